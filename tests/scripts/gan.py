"""Two models and two optimizers that take turns: `gan.py [twice] [DEFECT]`.

With `twice`, the generator's images serve both steps. The defects: `critic_kept` and `generator_kept` do not clear
gradients, and `penalty` is no defect but cannot be judged: it differentiates a gradient.
"""

import sys

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
    with torch.set_grad_enabled("twice" in sys.argv):
        fake = generator(noise)
    if "critic_kept" not in sys.argv:
        steps_critic.zero_grad()
    loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    if "penalty" in sys.argv:
        real.requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
        loss = loss + slope.square().sum(1).mean()
    loss.backward()
    steps_critic.step()
    if "generator_kept" not in sys.argv:
        steps_generator.zero_grad()
    if "twice" not in sys.argv:
        fake = generator(noise)
    F.softplus(-critic(fake)).mean().backward()
    steps_generator.step()
dist.destroy_process_group()
