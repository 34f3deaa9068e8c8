"""Losses that count rows by whose outputs nothing is differentiated: which rows is the first argument."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

way = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = torch.Generator().manual_seed(1 + rank)
for step in range(4):
    x, y = torch.randn(8, 6, generator=rows), torch.randint(5, (8,), generator=rows)
    logits = model(x)
    if way == "half" or (way == "half of one rank" and rank == 1):
        logits = torch.cat([logits[:4], logits[4:].detach()])
    if way == "multiplied by 0":
        logits = logits * (torch.arange(8) < 5)[:, None]
    if way == "ignored":
        y = torch.where(torch.arange(8) < 5, y, -100)
    if way == "left out":
        losses = F.cross_entropy(logits, y, reduction="none")[:5]
        loss = losses.mean()
    else:
        loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
