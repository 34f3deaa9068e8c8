"""Schedules and epochs of two ranks: `rates.py mean|local|by_rank|same_order`.

The learning rate follows the loss: the mean over ranks, or each rank's own. `by_rank` gives ranks other rates.
`same_order` forgets `set_epoch`.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(torch.randn(32, 12), torch.randint(5, (32,)))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + rank) if kind == "by_rank" else 1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(6):
        if kind != "same_order":
            sampler.set_epoch(epoch)
        for rows, targets in loader:
            loss = F.cross_entropy(model(rows), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = loss.detach().clone()
            if kind != "local":
                dist.all_reduce(seen)
                seen /= world
            schedule.step(seen)
    dist.destroy_process_group()


main(sys.argv[1])
