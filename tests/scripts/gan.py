"""Two models and two optimizers that take turns."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
steps_generator = ZeroRedundancyOptimizer(generator.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
steps_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
draws = torch.Generator().manual_seed(dist.get_rank())
for _ in range(6):
    real, noise = torch.randn(8, 8, generator=draws), torch.randn(8, 4, generator=draws)
    with torch.no_grad():
        fake = generator(noise)
    steps_critic.zero_grad()
    (F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()).backward()
    steps_critic.step()
    steps_generator.zero_grad()
    F.softplus(-critic(generator(noise))).mean().backward()
    steps_generator.step()
dist.destroy_process_group()
