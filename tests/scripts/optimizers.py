"""Optimizers that follow each other: `optimizers.py WAY`.

`restarted` makes another one once, `restored` loads the first one's state into it, `in_turn` has two of the same
parameters from the start, and `every_step` makes another one at every step.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(way: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)))
    rows = torch.Generator().manual_seed(dist.get_rank())
    first = optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        if (way in ("restarted", "restored") and step == 3) or way == "every_step":
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if way == "restored":
                optimizer.load_state_dict(state)
        if way == "in_turn":
            optimizer = second if step % 2 else first
        inputs, targets = torch.randn(8, 8, generator=rows), torch.randint(4, (8,), generator=rows)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    dist.destroy_process_group()


main(sys.argv[1])
