"""DDP under autocast to bfloat16, where rounding decides which ReLUs are active: `coarse.py [undivided|kept]`."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(defect: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    first = nn.Linear(8, 32)
    with torch.no_grad():  # in bfloat16, 1.003 is 1, so that these units see 0.001 where they should see -0.002
        first.weight[:16] = 0.0
        first.weight[:16, 0], first.weight[:16, 1] = 1.0, -1.003
        first.bias[:16] = 0.001
    model = DistributedDataParallel(nn.Sequential(first, nn.ReLU(), nn.Linear(32, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        for _ in range(3):
            rows, targets = torch.randn(8, 8, generator=data), torch.randint(5, (8,), generator=data)
            rows[:, :2] = 1.0
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(rows), targets)
            (loss if defect == "undivided" else loss / 3).backward()
        optimizer.step()
        if defect != "kept":
            optimizer.zero_grad()
    dist.destroy_process_group()


main(sys.argv[1] if len(sys.argv) > 1 else "")
