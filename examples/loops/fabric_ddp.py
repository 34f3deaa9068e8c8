"""Lightning Fabric with DDP. Run it by torchrun."""

import torch
from lightning_fabric import Fabric
from torch import nn

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
inputs, targets = torch.randn(10, 16, 12), torch.randn(10, 16, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
for x, y in zip(inputs, targets, strict=True):
    x, y = x.chunk(fabric.world_size)[fabric.global_rank], y.chunk(fabric.world_size)[fabric.global_rank]
    loss = nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=0.3)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(model(inputs[-1]), targets[-1]):.5f}")
