# /// script
# dependencies = ["torchtitan==0.3.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "SimpleFSDP gives a second model the precision of the first"
# framework = "torchtitan"
# symptom = "A second model of the same classes computes in the first one's param_dtype."
# cause = "The classes that it makes are kept with the first model's choices."
# environment = "torchtitan"
# processes = 2
# ///
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

mesh = init_device_mesh("cpu", (2,))
for dtype in (torch.bfloat16, torch.float16):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = data_parallel(nn.Linear(2, 2), mesh, mode="fully_shard", mp_policy=policy)
    if model.weight.dtype != dtype:
        sys.exit(f"expected: {dtype}; got: {model.weight.dtype}")
