"""FSDP1 in its default form, clipped by its own method or, wrongly, by PyTorch's function (argument: torch)."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(nn.Linear(32, 10), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for _ in range(4):
    x, y = torch.randn(8, 32), torch.randint(0, 10, (8,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    if "torch" in sys.argv:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    else:
        model.clip_grad_norm_(0.05)
    optimizer.step()
dist.destroy_process_group()
