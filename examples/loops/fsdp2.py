"""PyTorch FSDP2, a layer at a time (ZeRO-3). Run it by torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs, targets = torch.randn(10, 16, 12), torch.randn(10, 16, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in zip(inputs, targets, strict=True):
    x, y = x.chunk(dist.get_world_size())[dist.get_rank()], y.chunk(dist.get_world_size())[dist.get_rank()]
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(model(inputs[-1]), targets[-1]):.5f}")
dist.destroy_process_group()
