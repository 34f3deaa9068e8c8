"""Scripts whose rows, passes or clippings are unusual: `python rows_and_passes.py WAY`. Most are right."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

way = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
by_hand = way.startswith(("clipped", "adapted", "no pass"))


class Masked(nn.Module):
    """Takes a mask first, which is longer than the batch and the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, mask, x):
        return self.last(torch.tanh(self.body(x)) * mask.mean(0))


class Rule(torch.optim.Optimizer):
    """A rule of the script's own: each tensor moves along its gradient, by a fixed length."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= 1e-2 * p.grad / (p.grad.norm() + 1e-12)


model = Masked() if way == "mask first" else nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
if way == "sharded rule":
    fully_shard(model)
wrapped = model if by_hand or way == "sharded rule" else DDP(model)
optimizer = Rule(model.parameters()) if way.endswith("rule") else torch.optim.AdamW(model.parameters(), lr=1e-2)
seed = rank // 2 if way == "pairs of ranks" else rank
generator = torch.Generator().manual_seed(seed)
grid = torch.linspace(-1, 1, 96).reshape(12, 8)


def reduce_and_clip(p):
    dist.all_reduce(p.grad)
    p.grad /= world
    nn.utils.clip_grad_norm_(p, 0.01)


if way == "clipped in hooks":
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reduce_and_clip)
for step in range(5):
    x, y = torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)
    if way == "nan" and step == 1 and rank == 1:
        x[0, 0] = float("nan")
    if way == "adapted copies":
        inner = copy.deepcopy(model)
        rule = torch.optim.SGD(inner.parameters(), 0.1)
        F.cross_entropy(inner(x), y).backward()
        rule.step()
        for p, q in zip(model.parameters(), inner.parameters(), strict=True):
            p.grad = q.grad.clone()
            dist.all_reduce(p.grad)
        optimizer.step()
        continue
    optimizer.zero_grad()
    if way == "adversarial":  # the gradient of a first pass moves the inputs of the one that trains
        x.requires_grad_()
        F.cross_entropy(wrapped(x), y).backward()
        x = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
    if way == "norm told":
        for _ in range(2):
            (F.cross_entropy(wrapped(x), y) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    elif way.startswith("last micro-batch"):  # the backward pass stands after the loop
        for number in range(2):
            rows = slice(6 * number, 6 * number + 6)
            loss = F.cross_entropy(wrapped(x[rows]), y[rows]) / (1 if way.endswith("whole") else 2)
        loss.backward()
    elif way == "one micro-batch twice":
        for _ in range(2):
            (F.cross_entropy(wrapped(x), y) / 2).backward()
    elif way == "real and made up":  # a discriminator's two losses, whose sum it takes
        for rows, target in ((x, 1.0), (torch.randn(12, 8, generator=generator), 0.0)):
            F.binary_cross_entropy_with_logits(wrapped(rows), torch.full((12, 4), target)).backward()
    elif way == "loss told":  # for a log, of the batch that is trained on
        print(float(F.cross_entropy(wrapped(x), y)))
        F.cross_entropy(wrapped(x), y).backward()
    elif way.startswith("no pass on rank 1"):
        with torch.set_grad_enabled(rank == 0 or not way.endswith("blind")):
            loss = F.cross_entropy(model(x), y)
        if rank:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        else:
            loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    elif way == "cleared":
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.zero_grad()
    elif way == "mask first":
        F.cross_entropy(wrapped(torch.ones(20, 8).tril(), x), y).backward()
    elif way == "nan":
        loss = F.cross_entropy(wrapped(x), y)
        is_bad = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(is_bad)
        loss.backward()
        if is_bad:
            continue  # the next step clears
    else:
        F.cross_entropy(wrapped(grid if way == "grid" else x), y).backward()
    if way == "clipped in a loop":
        for p in model.parameters():
            reduce_and_clip(p)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
