"""Wrong at a scale that is not there: what a single rank of a fake world shows."""

from __future__ import annotations

import torch

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.ddp import DDP
from meshmark.spec.case import Case


class KeepsABucket(DDP):
    """The last rank keeps a buffer as large as half of the gradients, which no plan has."""

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        if context.rank == context.world_size - 1:
            bucket = torch.zeros(sum(p.numel() for p in engine.module.parameters()) // 2)  # type: ignore[attr-defined]
            engine.bucket = bucket  # type: ignore[attr-defined]
        return engine
