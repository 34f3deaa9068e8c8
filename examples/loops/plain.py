"""One process, without any framework: what the other loops of this folder are compared with."""

import torch
from torch import nn

torch.manual_seed(0)
inputs, targets = torch.randn(10, 16, 12), torch.randn(10, 16, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in zip(inputs, targets, strict=True):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(model(inputs[-1]), targets[-1]):.5f}")
