# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ShardedDataParallel does not reduce parameters that OSS is given later"
# framework = "fairscale"
# symptom = """
# Parameters that are unfrozen and added to the optimizer are trained by the gradient of their owner's rank alone, \
# also after refresh_trainable()."""
# cause = """
# ShardedDataParallel lists the parameters of its optimizers when it is made (_all_params), and asks that list alone \
# which of them are trainable."""
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

dist.init_process_group("gloo")
layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
for layer in layers:
    nn.init.ones_(layer.weight)
backbone, head = (layer.weight for layer in layers)
backbone.requires_grad_(False)
optimizer = OSS([head], optim=torch.optim.SGD, lr=0.1)
model = ShardedDataParallel(layers, optimizer, reduce_buffer_size=0)
backbone.requires_grad_()
optimizer.add_param_group({"params": [backbone]})
model.refresh_trainable()
model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()  # inputs 1 and 2, of which the mean is 1.5
optimizer.step()
if abs(backbone.item() - 0.85) > 1e-6:
    sys.exit(f"expected: 0.85 after a step of 0.1 by the gradient 1.5; got: {backbone.item():g}")
