"""Options that are not passed on, and schedules that run at another pace. Mixins over engines, and adapters."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from tests.broken.engine import Broken
from tests.broken.updates import Option


class Misread(Adapter):
    """Builds another case than the one asked for."""

    training: dict[str, Any] = {}
    """Fields of the workload that it gets wrong."""
    optimizing: dict[str, Any] = {}
    """Fields of the optimizer."""
    laying: dict[str, Any] = {}
    """Fields of the layout."""

    def build(self, case: Case, context: RankContext) -> Engine:
        optimizer = dataclasses.replace(case.workload.optimizer, **self.optimizing)
        workload = dataclasses.replace(case.workload, **{"optimizer": optimizer, **self.training})
        layout = dataclasses.replace(case.layout, **self.laying)
        other = dataclasses.replace(case, workload=workload, layout=layout)
        return super().build(other, context)  # type: ignore[safe-super]


class DecaysAll(Misread):
    """Norms and biases decay like the rest."""

    optimizing = {"decay_matrices_only": False}


class DecaysNothing(Option):
    options = {"weight_decay": 0.0}


class SwapsDecay(Broken):
    """The norms decay, the matrices do not."""

    def prepare(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 - group["weight_decay"]


class DecaysAtFullRate(Broken):
    """Weight decay that the learning rate does not multiply, but a constant does."""

    def prepare(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 10


class TrainsFrozen(Misread):
    """requires_grad is forgotten."""

    training = {"frozen": ()}


class StaysFrozen(Broken):
    """requires_grad is set again, and the optimizer is not told."""

    def unfreeze(self) -> None:
        for _, parameter in self.named():
            parameter.requires_grad_()


class FreezesMore(Misread):
    """All of the first block, for its name starts alike."""

    training = {"frozen": ("embedding.", "blocks.0.")}


class DecaysFrozen(Broken):
    """Weight decay moves what has no gradient."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        spec = self.case.workload.optimizer
        with torch.no_grad():
            for _, p in self.named():
                if not p.requires_grad:
                    p.mul_(1 - spec.learning_rate * spec.weight_decay)
        return norm


class Schedule(Broken):
    """Sets the learning rate of every step."""

    def due(self, step: int) -> int:
        """The step of the schedule that is taken in `step`, counted from 0."""
        raise NotImplementedError

    def update(self) -> Tensor | None:
        spec = self.case.workload.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = spec.learning_rate * spec.rate_factor(self.due(self.steps - 1))
        norm: Tensor | None = super().update()
        return norm


class Late(Schedule):
    """Stepped before the optimizer counts its first step: the first rate twice."""

    def due(self, step: int) -> int:
        return max(step - 1, 0)


class Early(Schedule):
    """Stepped before the optimizer."""

    def due(self, step: int) -> int:
        return step + 1


class PerMicroBatch(Schedule):
    """Stepped after every micro-batch."""

    def due(self, step: int) -> int:
        return step * self.case.layout.num_micro_batches


class PerRank(Schedule):
    """Stepped once for every rank."""

    def due(self, step: int) -> int:
        return step * self.context.world_size


class NeverStepped(Schedule):
    def due(self, step: int) -> int:
        return 0


class NoWarmUp(Misread):
    optimizing = {"warmup_steps": 0}


class NotClipped(Misread):
    optimizing = {"clip_norm": None}


class ClipsToOne(Misread):
    """The default of many a framework, in the place of what was asked for."""

    optimizing = {"clip_norm": 1.0}


class TellsClippedNorm(Broken):
    """The reported norm is the one after clipping."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        limit = self.case.workload.optimizer.clip_norm
        return norm if norm is None or limit is None else norm.clamp(max=limit)


class TellsOwnNorm(Broken):
    """Clipping is right, but the reported norm misses the other ranks' shards."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        return norm if norm is None else norm / self.context.world_size**0.5


class TellsWrongNormOnLastRank(Broken):
    """The last rank alone reports a wrong norm."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        return norm if norm is None or self.context.rank < self.context.world_size - 1 else 7 * norm


class ZeroForUnused(Broken):
    """A parameter without a gradient gets one of zero, and decays."""

    def after_backward(self) -> None:
        for _, p in self.named():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)


class StaleForUnused(Broken):
    """A parameter without a gradient keeps that of the step before."""

    def after_backward(self) -> None:
        for name, p in self.named():
            if p.grad is None and p.requires_grad:
                p.grad = self.earlier[name].clone()
        self.earlier = {name: p.grad.clone() for name, p in self.named() if p.grad is not None}


class SkipsNothing(Broken):
    """The block that a step should leave out is computed, for a captured graph holds it."""

    def backward(self, batch: Batch) -> Tensor:
        return super().backward(dataclasses.replace(batch, skipped_block=None))
