"""Ranks that train different functions, and ranks that seem to: what differs is the first argument."""

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
dropout = nn.Dropout(0.5 if way == "dropout" and rank else 0.1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.GELU(), dropout, nn.Linear(16, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = torch.Generator().manual_seed(1 + rank)
for step in range(4):
    x, y = torch.randn(8, 6, generator=rows), torch.randint(5, (8,), generator=rows)
    if way == "rows by rank":  # 8 and 6, and each loss counts by its rows
        x, y = x[: 8 - 2 * rank], y[: 8 - 2 * rank]
    logits = model(x)
    if way == "temperature":
        logits = logits / (1 + rank)
    elif way == "chance" and step % 2 == rank:  # another branch at other steps is no function of the rank's
        logits = logits.tanh()
    weights = torch.ones(5) if way == "class weights" and rank == 0 else None
    smoothing = 0.1 if way == "smoothing" and rank == 0 else 0.0
    loss = F.cross_entropy(logits, y, weight=weights, label_smoothing=smoothing)
    if way == "term" and rank == 0:
        loss = loss + 0.1 * logits.square().mean()
    if way == "rows by rank":
        loss = loss * (len(x) / 7)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
