"""A DDP training loop with a common defect: rows have unequal lengths, and each rank averages over its own tokens.

meshmark check --nproc 2 examples/scripts/uneven.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(5):
    tokens = torch.randint(50, (8, 17), generator=data)
    targets = tokens[:, 1:].clone()
    for row, length in enumerate(torch.randint(2, 17, (8,), generator=data)):
        targets[row, length:] = -100  # padding, which cross_entropy leaves out
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
