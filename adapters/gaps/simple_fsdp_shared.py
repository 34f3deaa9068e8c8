# /// script
# dependencies = ["torchtitan==0.3.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "SimpleFSDP unties shared parameters"
# framework = "torchtitan"
# symptom = "A weight that two modules share becomes two."
# cause = "Each module's parameter is sharded by itself."
# environment = "torchtitan"
# processes = 2
# ///
import sys

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

mesh = init_device_mesh("cpu", (2,))
first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
second.weight = first.weight
model = data_parallel(nn.Sequential(first, second), mesh, mode="fully_shard")
if (count := len([*model.parameters()])) != 1:
    sys.exit(f"expected: 1 parameter; got: {count}")
