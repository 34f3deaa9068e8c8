# /// script
# dependencies = ["horovod==0.28.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DistributedOptimizer.zero_grad takes no set_to_none"
# framework = "horovod"
# symptom = "optimizer.zero_grad(set_to_none=True) raises TypeError."
# cause = "The method overrides PyTorch's without its arguments."
# processes = 2
# launcher = "horovodrun --gloo -np 2 python"
# ///
import sys

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
try:
    optimizer.zero_grad(set_to_none=True)
except TypeError as error:
    sys.exit(f"expected: cleared gradients; got: {error}")
