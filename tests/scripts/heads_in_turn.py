"""Two heads, used in turn. Their optimizer steps every second time, on what has gathered since."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.heads = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 10)])

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x)))


net = Net()
of_body = torch.optim.AdamW(net.body.parameters(), lr=1e-2)
of_heads = torch.optim.AdamW(net.heads.parameters(), lr=1e-2)
rows = torch.Generator().manual_seed(100 + rank)
for step in range(8):
    x, y = torch.randn(8, 16, generator=rows), torch.randint(10, (8,), generator=rows)
    of_body.zero_grad()
    F.cross_entropy(net(x, step % 2), y).backward()
    for optimizer in (of_body, of_heads)[: 1 + step % 2]:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
    if step % 2 and sys.argv[1:] != ["stale"]:
        of_heads.zero_grad()
dist.destroy_process_group()
