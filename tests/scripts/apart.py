"""Ranks that act apart: `apart.py OPTION`.

Defects: `skips`, one rank skips a step; `first_only`, only the first of two micro-batches is reduced; `local_norm`,
FSDP2's shards are clipped by hand, by the norm of each rank's own. Not judged: `by_parts`, tensor parallelism by hand,
and gradients by `torch.func`: `transformed` by its `grad`, `functional` of copies of the parameters. Right: `fewer`, one rank has fewer batches, under DDP's `join`.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Halves(torch.autograd.Function):
    """Return a tensor, or add up its parts: one in the forward pass, the other in the backward pass."""

    @staticmethod
    def forward(ctx, x, adds):
        ctx.adds, x = adds, x.clone()
        if adds:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if not ctx.adds:
            dist.all_reduce(gradient)
        return gradient, None


class ByParts(nn.Module):
    """A layer of which each rank holds a half, made from a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return Halves.apply(self.down(F.gelu(self.up(Halves.apply(x, False)))), True)


def main(option: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = ByParts() if option == "by_parts" else nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    if option == "local_norm":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    wrapped = option in ("skips", "first_only", "fewer")
    model = DistributedDataParallel(net) if wrapped else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0 if option == "by_parts" else rank)

    def loss_of(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(net, parameters, (x,)), y)

    with model.join() if option == "fewer" else contextlib.nullcontext():
        for step in range(3 if option == "fewer" and rank else 5):
            x, y = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
            optimizer.zero_grad()
            if option == "transformed":
                found = torch.func.grad(loss_of)({n: p.detach() for n, p in net.named_parameters()}, x, y)
                for name, p in net.named_parameters():
                    dist.all_reduce(found[name])
                    p.grad = found[name] / world
            elif option == "functional":
                copies = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
                found = torch.autograd.grad(loss_of(copies, x, y), list(copies.values()))
                for gradient, p in zip(found, net.parameters(), strict=True):
                    dist.all_reduce(gradient)
                    p.grad = gradient / world
            else:
                F.cross_entropy(model(x), y).backward()
            if option == "first_only":
                with model.no_sync():
                    F.cross_entropy(model(x.flip(1)), y).backward()
            if option == "local_norm":
                own = [p.grad.to_local() for p in net.parameters()]
                norm = sum(g.square().sum() for g in own).sqrt()
                for gradient in own:
                    gradient.mul_(0.1 / norm)
            if not (option == "skips" and step == 1 and rank == 1):
                optimizer.step()
    dist.destroy_process_group()


main(sys.argv[1])
