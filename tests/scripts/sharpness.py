"""Sharpness-aware minimization: `sharpness.py [kept] [fsdp1]`; `kept` forgets to clear the first pass's gradient."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def main(kept: bool, sharded: bool) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 5))
    if sharded:
        model = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        model = DistributedDataParallel(net)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        rows, targets = torch.randn(8, 12, generator=data), torch.randint(5, (8,), generator=data)
        F.cross_entropy(model(rows), targets).backward()
        with torch.no_grad():
            square = sum(p.grad.square().sum() for p in parameters if p.grad is not None)
            if sharded:
                dist.all_reduce(square)
            own = [p.clone() for p in parameters]
            for p in parameters:
                if p.grad is not None:
                    p.add_(0.05 * p.grad / square.sqrt())
        if not kept:
            optimizer.zero_grad()
        F.cross_entropy(model(rows), targets).backward()
        with torch.no_grad():
            for p, value in zip(parameters, own, strict=True):
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main("kept" in sys.argv, "fsdp1" in sys.argv)
