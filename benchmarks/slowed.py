"""DDP with a pause in every step, as a share of the step's own time."""

from __future__ import annotations

import time
from typing import ClassVar

from torch import Tensor

from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.reference.data import Batch


class _Engine(DDPEngine):
    share: ClassVar[float]

    def step(self, batch: Batch) -> Tensor:
        started = time.perf_counter()
        loss = super().step(batch)
        until = time.perf_counter() + self.share * (time.perf_counter() - started)
        while time.perf_counter() < until:
            pass
        return loss


class _Engine0(_Engine):
    share = 0.0


class _Engine3(_Engine):
    share = 0.03


class _Engine1(_Engine):
    share = 0.01


class Slow0(DDP):
    """Baseline of the others: only the pause differs, and both are imported from one module."""

    engine = _Engine0


class Slow3(DDP):
    engine = _Engine3


class Slow1(DDP):
    engine = _Engine1


HONEST = "Slow0"
SLOWED = ("Slow3", "Slow1")
