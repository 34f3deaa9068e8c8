# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ShardedDataParallel with its default buckets stops reducing gradients"
# framework = "fairscale"
# symptom = "From the second step on, each rank trains with its own gradient."
# cause = """
# optimizer.zero_grad() sets gradients to None, and new ones are no longer views of the buckets that are reduced."""
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
layer = nn.Linear(4, 1)
optimizer = OSS(layer.parameters(), optim=torch.optim.SGD, lr=0.1)
model = ShardedDataParallel(layer, optimizer)
for step in range(2):
    model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    gradient = layer.weight.grad.clone()  # the mean over inputs 1 and 2 is 1.5
    dist.broadcast(gradient, optimizer._param_to_rank[layer.weight])
    if not torch.equal(gradient, torch.full((1, 4), 1.5)):
        sys.exit(f"expected: a gradient of 1.5 in step {step}; got: {gradient[0, 0].item()}")
    optimizer.step()
    optimizer.zero_grad()
