"""Hugging Face Accelerate over PyTorch FSDP2, a layer at a time (ZeRO-3). Run it by torchrun."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
torch.manual_seed(0)
inputs, targets = torch.randn(10, 16, 12), torch.randn(10, 16, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for x, y in zip(inputs, targets, strict=True):
    count, index = accelerator.num_processes, accelerator.process_index
    x, y = x.chunk(count)[index], y.chunk(count)[index]
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(model(inputs[-1]), targets[-1]):.5f}")
