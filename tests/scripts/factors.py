"""Loops that a factor, a group or a gradient of their own makes unusual: `factors.py OPTION`.

`half` multiplies a loss by 0.5 and `columns` adds up the losses of two columns, on two ranks; `group` adds a group of
parameters after the first step; `centred` changes gradients by hand, `adaptive` clips each on its own, and hooks of
`slowed` make those of one layer smaller; in `remainder`, the third step has one micro-batch where others have two;
`gathered_back` passes outputs to all ranks in an autograd function; `divided` adds up two micro-batches and divides the
gradients; `compressed` has DDP send fp16; `averaged` evaluates a moving average of the weights.

Defects: `gathered` does that in a function whose backward pass does not communicate; `gathered_own` too, for a loss of
each rank's own; `clipped_early` clips before gradients are reduced by hand; `halved` divides gradients once more; in
`evaluates`, one rank's model is in evaluation mode; in `stale`, one rank reads its first batch again.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


class Gather(torch.autograd.Function):
    """Return the rows of all ranks."""

    @staticmethod
    def forward(ctx, rows, sums):
        ctx.sums = sums
        found = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(found, rows)
        return torch.stack(found)

    @staticmethod
    def backward(ctx, gradients):
        gradients = gradients.contiguous()
        if ctx.sums:
            dist.all_reduce(gradients)
        return gradients[dist.get_rank()], None


def main(option: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    net[0].requires_grad_(option != "group")
    model = net if option == "clipped_early" else DistributedDataParallel(net)
    if option == "compressed":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    average = AveragedModel(net) if option == "averaged" else None
    optimizer = torch.optim.AdamW(net[3].parameters() if option == "group" else net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    if option == "slowed":
        for p in net[0].parameters():
            p.register_hook(lambda gradient: 0.1 * gradient)
    if option == "evaluates" and rank == 0:
        net.eval()
    for step in range(4):
        if option == "group" and step == 1:
            net[0].requires_grad_(True)
            model = DistributedDataParallel(net)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 1e-4})
        if not (option == "stale" and rank == 1 and step):
            x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)
        if option == "divided":
            F.mse_loss(model(x.flip(1)), y).backward()
        if option == "remainder" and step != 2:
            (F.mse_loss(model(x.flip(1)), y) / 2).backward()
        if option == "remainder":
            loss = F.mse_loss(model(x), y) / 2
        elif option == "columns":
            loss = F.mse_loss(model(x), y, reduction="none").sum(-1).mean()
        elif option.startswith("gathered"):
            rows = Gather.apply(model(x), option == "gathered_back").flatten(0, 1)
            own = slice(rank * len(x), (rank + 1) * len(x)) if option == "gathered_own" else slice(None)
            loss = F.mse_loss((rows @ rows.T)[own], torch.eye(len(rows))[own])
        else:
            loss = (0.5 if option == "half" else 1.0) * F.mse_loss(model(x), y)
        loss.backward()
        if option == "centred":
            for p in net.parameters():
                p.grad -= p.grad.mean()
        if option in ("halved", "divided"):
            for p in net.parameters():
                p.grad /= 2  # ranks, or micro-batches
        if option == "adaptive":
            for p in net.parameters():
                p.grad.mul_((0.1 * p.detach().norm() / p.grad.norm()).clamp(max=1))
        if option == "clipped_early":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        if average:
            average.update_parameters(net)
            with torch.no_grad():
                average(x)
    dist.destroy_process_group()


main(sys.argv[1])
