# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "DDP does not reduce parameters that are unfrozen after wrapping"
# framework = "torch"
# symptom = "Each rank trains them with its own gradient, without a word, and replicas drift apart."
# cause = """
# DistributedDataParallel gives its reducer the parameters that require a gradient when it is made. Its documentation \
# forbids to change parameters later; nothing checks it."""
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
for layer in layers:
    nn.init.ones_(layer.weight)
layers[0].weight.requires_grad_(False)
model = DistributedDataParallel(layers)
layers[0].weight.requires_grad_()
model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()  # inputs 1 and 2, of which the mean is 1.5
if layers[0].weight.grad.item() != 1.5:
    sys.exit(f"expected: a gradient of 1.5; got: {layers[0].weight.grad.item()} on rank {dist.get_rank()}")
