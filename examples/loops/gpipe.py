"""PyTorch's pipelining with the schedule GPipe on two stages. Run it by torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs, targets = torch.randn(10, 16, 12), torch.randn(10, 16, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
rank, last = dist.get_rank(), dist.get_world_size() - 1
part = model[2:] if rank == last else model[:2]
stage = PipelineStage(part, rank, last + 1, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
for x, y in zip(inputs, targets, strict=True):
    schedule.step(*([x] if rank == 0 else []), target=y if rank == last else None)
    norm = nn.utils.get_total_norm([p.grad for p in part.parameters()]) ** 2
    dist.all_reduce(norm)
    nn.utils.clip_grads_with_norm_(part.parameters(), 0.3, norm**0.5)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    outputs = schedule.eval(*([inputs[-1]] if rank == 0 else []), target=targets[-1] if rank == last else None)
if rank == last:
    print(f"loss {nn.functional.mse_loss(outputs, targets[-1]):.5f}")
dist.destroy_process_group()
