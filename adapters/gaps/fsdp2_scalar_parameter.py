# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "fully_shard refuses a parameter without a dimension"
# framework = "torch"
# symptom = "A module with a scalar parameter, such as CLIP's logit_scale, cannot be sharded."
# cause = """
# Parameters are sharded by their first dimension, and a scalar has none."""
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
module = nn.Linear(4, 4)
module.scale = nn.Parameter(torch.tensor(2.0))
try:
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
except ValueError as error:
    sys.exit(f"expected: a module with a scalar parameter is sharded; got: {error}")
