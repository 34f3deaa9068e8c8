"""A loop that calls its model before it is wrapped, to initialise lazy layers, and past the wrapper: `[bypass]`."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def main(options: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 4))
    model(torch.randn(2, 8))
    print(model(torch.randn(2, 8)).shape)
    if "bypass" in options:
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        inputs, targets = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        loss = F.cross_entropy((model.module if "bypass" in options else model)(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main(sys.argv[1:])
