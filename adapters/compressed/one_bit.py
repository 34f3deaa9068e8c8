"""Engines of Adam and LAMB whose momenta travel as signs, after `meshmark.algorithms.one_bit.transition`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapters.compressed.served import DoubleSqueezeEngine, Tensors
from meshmark.algorithms.one_bit import ZeroOneAdam
from meshmark.algorithms.one_bit.lamb_rates import AVERAGED, FACTORS, NEAR, RATIOS


class MomentsEngine(DoubleSqueezeEngine):
    """`kept["momentum"]` and `kept["variance"]`: Adam's. The optimizer steps on the one over the root of the other."""

    more: tuple[str, ...] = ()
    """Names of further vectors that are kept."""

    def direction(self, own: Tensors) -> Tensors:
        if not self.kept:  # with what is left, which nothing is yet: no step holds more than the one before
            kept = ["momentum", "variance", *self.more, "left", *(["left of server"] if self.serves else [])]
            self.kept = {what: {name: torch.zeros_like(g) for name, g in own.items()} for what in kept}
        return self.stepped_on(own)

    def stepped_on(self, own: Tensors) -> Tensors:
        raise NotImplementedError

    def squeezed(self, vectors: Tensors) -> Tensors:
        """Return the mean of what all replicas receive of each replica's `vectors`."""
        return super().direction(vectors)

    def moved(self, own: Tensors) -> Tensors:
        beta = self.case.workload.optimizer.betas[0]
        return {name: m.mul(beta).add_(own[name].mul(1 - beta)) for name, m in self.kept["momentum"].items()}

    def adapt(self, own: Tensors) -> None:
        self.square(self.kept["variance"], own)

    def square(self, variances: Tensors, own: Tensors) -> None:
        beta = self.case.workload.optimizer.betas[1]
        for name, v in variances.items():
            v.mul_(beta).addcmul_(own[name], own[name], value=1 - beta)

    def preconditioned(self, momentum: Tensor, variance: Tensor) -> Tensor:
        return momentum.div(variance.sqrt().add_(self.case.workload.optimizer.eps)).masked_fill_(variance == 0, 0)


class OneBitAdamEngine(MomentsEngine):
    """The variance stays as the warm-up left it."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        if self.algorithm.reduces_gradients(self.steps_done):
            for gradient in self.gradients().values():
                dist.all_reduce(gradient)
                gradient.div_(dist.get_world_size())

    def stepped_on(self, own: Tensors) -> Tensors:
        moved = self.moved(own)
        if self.algorithm.compresses(self.steps_done):
            moved = self.squeezed(moved)
        else:
            self.adapt(own)
        self.kept["momentum"] = moved
        return {name: self.preconditioned(m, self.kept["variance"][name]) for name, m in moved.items()}


@dataclass(kw_only=True)
class Rate:
    """Learning-rate factor of a tensor."""

    average: float = 0.0
    """Moving average of the warm-up's rates."""
    factor: float = 1.0
    """Factor by which the rate is multiplied now."""


class OneBitLAMBEngine(OneBitAdamEngine):
    """`kept["fresh"]` is the variance of gradients as derived from compressed momenta. It determines tensors' rates."""

    more = ("fresh",)
    rates: dict[str, Rate]

    def stepped_on(self, own: Tensors) -> Tensors:
        if self.steps_done == 0:
            self.rates = {name: Rate() for name in own}
        compresses, before = self.algorithm.compresses(self.steps_done), self.kept["momentum"]
        found = super().stepped_on(own)
        if compresses:
            self.follow(before)
        optimizer, parameters = self.case.workload.optimizer, dict(self.named_parameters())
        for name, update in found.items():
            x = parameters[name].detach()
            if optimizer.decays(name):
                update.add_(x, alpha=optimizer.weight_decay)
            update.mul_(self.adapted(name) if compresses else self.trusted(name, x, update))
        return found

    def follow(self, before: Tensors) -> None:
        """Update `kept["fresh"]` with the gradient that changed the momentum, which was `before`."""
        beta = self.case.workload.optimizer.betas[0]
        moved = self.kept["momentum"]
        self.square(self.kept["fresh"], {n: m.sub(before[n], alpha=beta).div_(1 - beta) for n, m in moved.items()})

    def adapt(self, own: Tensors) -> None:
        super().adapt(own)
        for name, fresh in self.kept["fresh"].items():
            fresh.copy_(self.kept["variance"][name])

    def trusted(self, name: str, x: Tensor, update: Tensor) -> float:
        """Return the rate factor during the warm-up, and update its average."""
        of, to = x.norm().item(), update.norm().item()
        ratio = min(max(of / to, RATIOS[0]), RATIOS[1]) if of and to else 1.0
        self.rates[name].average = AVERAGED * self.rates[name].average + (1 - AVERAGED) * ratio
        return ratio

    def adapted(self, name: str) -> float:
        """Return the rate factor after the warm-up, and update it."""
        rate = self.rates[name]
        grown = min(max(self.grown(name), FACTORS[0]), FACTORS[1])
        rate.factor = min(max(grown, (1 - NEAR) * rate.factor), (1 + NEAR) * rate.factor)
        return rate.factor * rate.average

    def grown(self, name: str) -> float:
        """Return the largest factor by which an element's step would have grown with the current variance.

        It is that of the element whose gradients have shrunk most.
        """
        variance, fresh = self.kept["variance"][name], self.kept["fresh"][name]
        eps = self.case.workload.optimizer.eps
        ratio = variance.sqrt().add_(eps).div_(fresh.sqrt().add_(eps)).masked_fill_(variance == 0, 0)
        return ratio.max().item()

    def state(self) -> dict[str, Any]:
        return super().state() | {"rates": {n: (r.average, r.factor) for n, r in self.rates.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.rates = {n: Rate(average=average, factor=factor) for n, (average, factor) in state["rates"].items()}


class ZeroOneAdamEngine(MomentsEngine):
    """`kept["stepped"]`: what replicas have stepped by, before it is divided, since they met at `kept["met"]`."""

    more = ("stepped", "met")
    since = 0.0
    """The sum of learning rates."""

    def stepped_on(self, own: Tensors) -> Tensors:
        if not self.since:
            for name, parameter in self.trained():
                self.kept["met"][name].copy_(parameter)
        if self.case.workload.algorithm_as(ZeroOneAdam).adapts(self.steps_done):
            self.adapt(self.mean(own))
        moved = self.kept["momentum"] = self.moved(own)
        (rate,) = {group["lr"] for group in self.optimizer.param_groups}
        self.since += rate
        for name, m in moved.items():
            self.kept["stepped"][name].add_(m.mul(rate))
        return {name: self.preconditioned(m, self.kept["variance"][name]) for name, m in moved.items()}

    def mean(self, own: Tensors) -> Tensors:
        found = {name: g.clone() for name, g in own.items()}
        for gradient in found.values():
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
        return found

    def trained(self) -> list[tuple[str, Tensor]]:
        return [(name, p.detach()) for name, p in self.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def update(self) -> Tensor | None:
        due = self.algorithm.compresses(self.steps_done)
        norm = super().update()
        if due:
            self.meet()
        return norm

    def meet(self) -> None:
        together = self.squeezed(self.kept["stepped"])
        for name, parameter in self.trained():
            step = self.preconditioned(together[name], self.kept["variance"][name])
            parameter.copy_(self.kept["met"][name].sub(step))
        self.kept["momentum"] = {name: u.mul(1 / self.since) for name, u in together.items()}
        self.kept["stepped"] = {name: torch.zeros_like(u) for name, u in together.items()}
        self.since = 0.0

    def state(self) -> dict[str, Any]:
        return super().state() | {"since": self.since}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.since = state["since"]
