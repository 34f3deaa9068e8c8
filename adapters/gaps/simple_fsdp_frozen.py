# /// script
# dependencies = ["torchtitan==0.3.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "SimpleFSDP trains frozen parameters"
# framework = "torchtitan"
# symptom = "A parameter with requires_grad=False is trained after data_parallel()."
# cause = "Every shard becomes a new nn.Parameter, which requires a gradient."
# environment = "torchtitan"
# processes = 2
# ///
import sys

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

mesh = init_device_mesh("cpu", (2,))
model = nn.Linear(2, 2)
model.weight.requires_grad_(False)
model = data_parallel(model, mesh, mode="fully_shard")
if dict(model.named_parameters())["weight"].requires_grad:
    sys.exit("expected: a frozen weight; got: one that requires a gradient")
