"""DDP that trains on without an error, and wrongly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from adapters.ddp import DDP, DDPEngine
from meshmark.adapter import Engine, RankContext
from meshmark.case import Case


class NoReductionEngine(DDPEngine):
    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.module.no_sync():
            yield


class WrongMicroBatchesEngine(DDPEngine):
    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss / self.case.layout.num_micro_batches)


class NeverUpdatesEngine(DDPEngine):
    def update(self) -> Tensor | None:
        before = [p.detach().clone() for p in self.module.parameters()]
        norm = super().update()
        with torch.no_grad():
            for parameter, value in zip(self.module.parameters(), before, strict=True):
                parameter.copy_(value)
        return norm


class SlightScaleEngine(DDPEngine):
    """One norm's gradient off by a hundred-thousandth: far below what any loss shows."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for name, parameter in self.named_parameters():
            if name == "blocks.1.attention_norm.weight" and parameter.grad is not None:
                parameter.grad.mul_(1.00001)


class Broken(DDP):
    engine: type[DDPEngine]

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        engine.__class__ = self.engine
        return engine


class NoReduction(Broken):
    engine = NoReductionEngine


class WrongMicroBatches(Broken):
    engine = WrongMicroBatchesEngine


class NeverUpdates(Broken):
    engine = NeverUpdatesEngine


class SlightScale(Broken):
    engine = SlightScaleEngine
