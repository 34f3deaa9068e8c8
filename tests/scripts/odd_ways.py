"""Unusual ways of training in data parallel, by hand: `python odd_ways.py WAY`. Most are right."""

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm

way = sys.argv[1]
BY_HAND = ("parts", "thawed", "twice", "faint", "faint left out")
"""Ways in which gradients are averaged over ranks by hand."""
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
random.seed(0)


class Skips(nn.Module):
    """Leaves its block out by Python's random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x if random.random() < 0.5 else x + torch.tanh(self.block(x)))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.four, self.three = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x, head="four"):
        return getattr(self, head)(torch.tanh(self.body(x)))


class Projects(nn.Module):
    """Multiplies by a tensor of an attribute, which is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.projection, self.last = torch.randn(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        bias = torch.from_numpy(np.ones((16, 4), dtype=np.float32))
        return self.last(torch.tanh(x @ self.projection)) + torch.tanh(x @ self.projection) @ bias


class Reverse(torch.autograd.Function):
    """Multiplies the gradient by a negative number, as domain-adversarial training does (Ganin et al., 2016)."""

    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return -context.factor * gradient, None


class Reverses(nn.Module):
    """Has a factor that acts in the backward pass alone, and that the script raises at every step."""

    def __init__(self):
        super().__init__()
        self.body, self.last, self.factor = nn.Linear(8, 8), nn.Linear(8, 4), 0.0

    def forward(self, x):
        return self.last(Reverse.apply(torch.tanh(self.body(x)), self.factor))


class HidesState(nn.Module):
    """Keeps a state where nobody looks: in the function that it calls."""

    def __init__(self):
        super().__init__()
        self.body, calls = nn.Linear(8, 4), []
        self.count = lambda: calls.append(1) or len(calls)

    def forward(self, x):
        return self.body(x) * (1 + 0.1 * self.count())


class Faint(nn.Module):
    """Has a parameter whose gradient is a billionth of the others', as of a layer scale that begins near zero."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.faint = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) + 1e-9 * self.faint)


class Remembers(nn.Module):
    """Goes on from the state that its last call left in an attribute."""

    def __init__(self):
        super().__init__()
        self.body, self.last, self.state = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4), None

    def forward(self, x):
        outputs, state = self.body(x.view(12, 2, 4), self.state)
        self.state = state.detach()
        return self.last(outputs[:, -1])


class Contrast(nn.Module):
    """A loss over the rows of all ranks, gathered without their gradients."""

    def forward(self, features):
        others = [torch.zeros_like(features) for _ in range(world)]
        dist.all_gather(others, features)
        return F.cross_entropy(features @ torch.cat(others).T, torch.arange(len(features)) + len(features) * rank)


model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
if way == "skips":
    model = Skips()
elif way == "heads":
    model = Heads()
elif way == "projects":
    model = Projects()
elif way in ("faint", "faint left out"):
    model = Faint()
elif way == "reverses":
    model = Reverses()
elif way == "hides a state":
    model = HidesState()
elif way == "remembers":
    model = Remembers()
elif way == "parametrized":
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4))
elif way == "masters":
    model = model.bfloat16()
elif way == "thawed":
    model[0].requires_grad_(False)
wrapped = DDP(model, find_unused_parameters=way in ("skips", "heads")) if way not in BY_HAND else model
parameters = list(model.parameters())
held = parameters
if way == "masters":
    held = [p.detach().float().requires_grad_() for p in parameters]
elif way == "parts":  # each rank steps some parameters, and tells the others
    held = parameters[rank::world]
optimizer = torch.optim.AdamW(held, lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=way == "unscaled")
generator = torch.Generator().manual_seed(rank)
for step in range(5):
    x, y = torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)
    optimizer.zero_grad()
    if way == "reverses":
        model.factor += 0.1
    if way == "thawed" and step == 1:
        model[0].requires_grad_(True)
    if way == "few rows":  # that exist: all batches hold the same ones, of other numbers
        x = F.one_hot(torch.randint(0, 8, (64,), generator=generator), 8).float()
        y = torch.randint(0, 4, (64,), generator=generator)
    if way == "heads":
        F.cross_entropy(wrapped(x), y).backward()
        F.cross_entropy(wrapped(x.flip(0), "three"), y.flip(0) % 3).backward()
    elif way == "metric":  # a pass with gradients on, by which nothing is differentiated
        accuracy = (wrapped(x.flip(0)).argmax(1) == y).float().mean()
        F.cross_entropy(wrapped(x), y).backward()
    elif way == "half":
        losses = [F.cross_entropy(wrapped(x), y) / 2, F.cross_entropy(wrapped(x.flip(1)), y) / 2]
        losses[1].backward()
    elif way == "gathered":
        Contrast()(wrapped(x)).backward()
    elif way == "focal":
        losses = F.cross_entropy(wrapped(x), y, reduction="none")
        ((1 - torch.exp(-losses)) ** 2 * losses).mean().backward()
    elif way == "mixup":
        share, outputs = torch.rand((), generator=generator).item(), wrapped(x)
        (share * F.cross_entropy(outputs, y) + (1 - share) * F.cross_entropy(outputs, y.flip(0))).backward()
    elif way == "unscaled":  # the scaler divides what it has not multiplied
        loss = F.cross_entropy(wrapped(x), y)
        scaler.scale(loss)
        loss.backward()
    else:
        F.cross_entropy(wrapped(x.to(parameters[0].dtype)).float(), y).backward()
    if way in BY_HAND:
        for number, p in enumerate(parameters):
            if way == "faint left out" and p is model.faint:
                dist.broadcast(p.grad, 0)
            elif p.grad is not None:
                dist.all_reduce(p.grad)
                if not (way == "thawed" and number < 2) and not (way == "twice" and number == 3):
                    p.grad /= world
    if way == "own counts":
        for p in parameters:
            p.grad /= rank + 2
    if way == "masters":
        for own, p in zip(held, parameters, strict=True):
            own.grad, p.grad = p.grad.float(), None
    if way == "unscaled":
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if way == "masters":
        with torch.no_grad():
            for own, p in zip(held, parameters, strict=True):
                p.copy_(own)
    if way == "parts":
        for number, p in enumerate(parameters):
            dist.broadcast(p.data, number % world)
            p.grad = None
dist.barrier()
dist.destroy_process_group()
