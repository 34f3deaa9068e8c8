"""A loop of Lightning Fabric's, with DDP in bf16."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
rows = DataLoader(TensorDataset(torch.randn(64, 16), torch.randint(4, (64,))), 4)
for x, y in fabric.setup_dataloaders(rows):
    fabric.backward(F.cross_entropy(model(x), y))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
