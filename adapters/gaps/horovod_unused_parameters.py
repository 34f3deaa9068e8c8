# /// script
# dependencies = ["horovod==0.28.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Horovod gives a parameter that no rank uses a gradient of zero"
# framework = "horovod"
# symptom = "Moments and weights of an unused parameter decay."
# cause = "DistributedOptimizer.synchronize reduces a gradient for every parameter, and makes those that are missing."
# processes = 2
# launcher = "horovodrun --gloo -np 2 python"
# ///
import sys

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
used, unused = nn.Linear(1, 1), nn.Linear(1, 1)
both = nn.ModuleDict({"used": used, "unused": unused})
optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=both.named_parameters())
used(torch.ones(1, 1)).sum().backward()
optimizer.synchronize()
if unused.weight.grad is not None:
    sys.exit(f"expected: no gradient; got: {unused.weight.grad.item()}")
