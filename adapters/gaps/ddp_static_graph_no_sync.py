# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "DDP with static_graph=True fails when the first micro-batch is not reduced"
# framework = "torch"
# symptom = "An internal assertion in the reducer fails in the second backward pass."
# cause = "The reducer records the static graph in its first iteration, which must therefore reduce."
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layer = nn.Linear(1, 1, bias=False)
model = DistributedDataParallel(layer, static_graph=True)
try:
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
except RuntimeError as error:
    sys.exit(f"expected: a gradient of 2; got: {str(error)[:160]}")
if layer.weight.grad.item() != 2.0:
    sys.exit(f"expected: a gradient of 2; got: {layer.weight.grad.item()}")
