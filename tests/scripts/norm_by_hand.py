"""FSDP2 whose gradients are clipped without `clip_grad_norm_`: `python norm_by_hand.py WAY MAX_NORM`. All are right."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

way, most = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 8, (8,), generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if way == "in two":
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    else:
        square = sum((p.grad.to_local() ** 2).sum() for p in model.parameters())
        dist.all_reduce(square)
        for p in model.parameters():
            p.grad.to_local().mul_((most / (square.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
dist.destroy_process_group()
