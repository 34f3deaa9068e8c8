"""Two losses of unequal weight, gradients clipped by value, and a buffer that each rank makes of its own rows."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.classes, self.values = nn.Linear(32, 5), nn.Linear(32, 2)
        self.register_buffer("center", torch.zeros(32))

    def forward(self, x):
        x = self.body(x) - self.center
        with torch.no_grad():
            self.center.lerp_(x.mean(0), 0.1)
        return self.classes(x), self.values(x)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Model(), broadcast_buffers="broadcast" in sys.argv)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(6):
    for micro in range(2):
        x, y = torch.randn(8, 12, generator=data), torch.randint(5, (8,), generator=data)
        model.require_backward_grad_sync = micro == 1
        classes, values = model(x)
        ((F.cross_entropy(classes, y) + 0.3 * F.mse_loss(values, x[:, :2])) / 2).backward()
        if "schedule" in sys.argv:
            schedule.step()
    nn.utils.clip_grad_value_(model.parameters(), clip_value=0.01)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
