"""Accelerate's DDP by its other arguments: a model that Dynamo captures, and gradients that are clipped by value."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.accelerate import Accelerate, AccelerateDDPEngine
from meshmark.adapters.accelerate.prepare import TakesSeveral
from meshmark.errors import AdapterError
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Precision


class AccelerateCaptured(TakesSeveral, Accelerate):
    """`dynamo_backend="eager"`: `torch.compile` captures the model inside DDP, cut where DDP's buckets end, and runs
    what it has captured by PyTorch's own kernels."""

    capabilities: ClassVar = dataclasses.replace(
        Accelerate.capabilities,
        families=TEXT_FAMILIES - {Family.MIXTURE},
        recomputes=frozenset({Recompute.NONE}),
        precisions=frozenset({Precision.FP32}),
        lacks={
            **Accelerate.capabilities.lacks,
            Family.MIXTURE: "Dynamo cuts a graph at every choice of experts",
            Feature.RECOMPUTE: "not tried",
            Precision.FP64: "not tried",
            Precision.BF16: "not tried",
        },
    )

    def arguments(self) -> dict[str, Any]:
        return {"dynamo_backend": "eager"}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where the model is not compiled, which what is measured would not show."""
        engine = super().build(case, context)
        assert isinstance(engine, AccelerateDDPEngine)
        if not hasattr(engine.module, "_orig_mod"):
            raise AdapterError(f"rank {context.rank}: Accelerate compiles no {type(engine.module).__name__}")
        return engine


class ClipsValuesEngine(AccelerateDDPEngine):
    """No gradient exceeds the limit, so that the update must be that of unclipped ones."""

    limit: ClassVar = 1e4

    def update(self) -> Tensor | None:
        self.accelerator.clip_grad_value_(self.module.parameters(), self.limit)
        return super().update()


class AccelerateClipsValues(Accelerate):
    """`clip_grad_value_` before every update, by a limit that leaves gradients as they are."""

    through: ClassVar = ClipsValuesEngine
