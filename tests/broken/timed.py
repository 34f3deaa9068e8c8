"""Right wherever their gradients and updates are looked at, and wrong in `step`, which is all that the clock sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from meshmark.reference.data import Batch
from tests.broken.engine import Broken

JUDGED_STEPS = 5
"""Steps of an instrumented pass."""


class InSteps(Broken):
    stepping = False

    def step(self, batch: Batch) -> Tensor:
        self.stepping = True
        try:
            return super().step(batch)
        finally:
            self.stepping = False


class StepsUnreduced(InSteps):
    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.module.no_sync() if self.stepping else super().micro_batch(last):
            yield


class StepsUnclipped(InSteps):
    def clip(self, max_norm: float) -> Tensor | None:
        norm: Tensor | None = super().clip(float("inf") if self.stepping else max_norm)
        return norm


class StepsUnclippedInTheEnd(InSteps):
    """After the warm-up, and long after the last step that is judged."""

    def clip(self, max_norm: float) -> Tensor | None:
        late = self.stepping and self.steps > 2 * JUDGED_STEPS
        norm: Tensor | None = super().clip(float("inf") if late else max_norm)
        return norm


class StepsOnHalfTheBatch(InSteps):
    """Twice on the same half."""

    def step(self, batch: Batch) -> Tensor:
        half = torch.arange(len(batch) // 2)
        return super().step(batch.take(torch.cat([half, half])))


class ReducesFirstSteps(Broken):
    """As many as anyone looks at."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with super().micro_batch(last) if self.steps < JUDGED_STEPS else self.module.no_sync():
            yield
