"""FairScale's OSS and ShardedDataParallel (ZeRO-2). Run it by torchrun."""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs, targets = torch.randn(10, 16, 12), torch.randn(10, 16, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-2)
# Gradients in a buffer are no longer reduced once `zero_grad` has cut them out of it: reports/gaps.md.
model = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)
for x, y in zip(inputs, targets, strict=True):
    x, y = x.chunk(dist.get_world_size())[dist.get_rank()], y.chunk(dist.get_world_size())[dist.get_rank()]
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.clip_grad_norm(0.3)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(model(inputs[-1]), targets[-1]):.5f}")
dist.destroy_process_group()
