"""A correct engine whose loss scale overflows now and then, as one that grows does."""

from __future__ import annotations

import torch
from torch import Tensor

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.spec.case import Case
from meshmark.theory.traffic import METERED_STEP

HIGH = 2.0**20


class OverflowsNowAndThen(DDP):
    """In the first step, and in the metered one."""

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, DDPEngine)
        engine.scaler = torch.amp.GradScaler(context.device.type, init_scale=HIGH)
        whole, taken = engine.update, 0

        def update() -> Tensor | None:
            nonlocal taken
            before = engine.scaler.get_scale()
            norm = whole()
            takes = engine.scaler.get_scale() >= before
            taken += takes
            if takes and taken == METERED_STEP:
                engine.scaler.update(HIGH)
            return norm

        engine.update = update  # type: ignore[method-assign]
        return engine
