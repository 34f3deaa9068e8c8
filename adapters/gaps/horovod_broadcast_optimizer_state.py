# /// script
# dependencies = ["horovod==0.28.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "broadcast_optimizer_state before the first step makes a step of its own"
# framework = "horovod"
# symptom = "The first step of AdamW is counted as its second, and the weight has decayed twice."
# cause = "Horovod creates a missing state by a step with gradients of zero, which decays weights and counts."
# processes = 2
# launcher = "horovodrun --gloo -np 2 python"
# ///
import sys

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
model = nn.Linear(1, 1, bias=False)
nn.init.ones_(model.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
optimizer.zero_grad()
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
steps = int(optimizer.state[model.weight]["step"])
if steps != 1:
    sys.exit(f"expected: 1 step; got: {steps}, with a weight of {model.weight.item():.4g} for 0.85")
