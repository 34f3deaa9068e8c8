"""A moving average of the weights, beside training: `averages.py restored|kept|swapped|lookahead|clipped`.

`restored` evaluates with the average and takes it back. `kept` does not, and trains on. `swapped` writes the average to
the model. `lookahead` and `clipped` are no defects: every two steps an outer step; weights clipped as in a WGAN.
"""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 5))
    average = copy.deepcopy(net).requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(12):
        rows, targets = torch.randn(8, 12, generator=data), torch.randint(5, (8,), generator=data)
        F.cross_entropy(model(rows), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        last_of_two = step % 2 == 1
        with torch.no_grad():
            for p, mean in zip(net.parameters(), average.parameters(), strict=True):
                if kind == "swapped":
                    p.lerp_(mean, 0.1)
                elif kind == "clipped":
                    p.clamp_(-0.1, 0.1)
                elif kind != "lookahead":
                    mean.lerp_(p, 0.1)
                elif last_of_two:
                    mean.lerp_(p, 0.5)
                    p.copy_(mean)
        if last_of_two and kind in ("restored", "kept"):
            own = copy.deepcopy(net.state_dict())
            net.load_state_dict(average.state_dict())
            with torch.no_grad():
                net(rows)
            if kind == "restored":
                net.load_state_dict(own)
    dist.destroy_process_group()


main(sys.argv[1])
