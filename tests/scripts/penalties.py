"""A loss with a term that is computed from the weights: `penalties.py l2|large|l1|norms|kept [undivided]`.

`kept` is no penalty on weights: the model keeps a hidden value as an attribute, which enters the loss.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 40), nn.Linear(40, 5)

    def forward(self, rows):
        self.hidden = F.silu(self.first(rows))
        return self.last(self.hidden)


def main(kind: str, undivided: bool) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    matrices = [p for p in net.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        for _ in range(2):
            rows, targets = torch.randn(8, 12, generator=data), torch.randint(5, (8,), generator=data)
            loss = F.cross_entropy(model(rows), targets)
            if kind in ("l2", "large"):
                loss = loss + (5.0 if kind == "large" else 0.003) * sum(p.square().sum() for p in matrices)
            elif kind == "l1":
                loss = loss + 0.001 * sum(p.abs().sum() for p in matrices)
            elif kind == "norms":
                loss = loss + 0.01 * sum(p.norm() for p in matrices)
            else:
                loss = loss + 0.1 * net.hidden.square().mean()
            (loss if undivided else loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main(sys.argv[1], "undivided" in sys.argv)
