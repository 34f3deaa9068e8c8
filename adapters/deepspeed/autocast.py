"""DeepSpeed's `torch_autocast` section: float32 weights, and products in bf16 under `torch.autocast`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from meshmark.adapter.contract import Arithmetic, Casting
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.replicated import DeepSpeedZero0
from meshmark.errors import AdapterError
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision


class DeepSpeedAutocast(DeepSpeedZero0):
    """bf16 without ZeRO, whose own `bf16` section accumulates gradients in bf16 (see `DeepSpeedZero0`).

    Gradients of all modules are reduced in float32: `lower_precision_safe_modules` is empty. By default those of linear
    layers would be reduced in bf16.
    """

    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedZero0.capabilities,
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={
            **{
                feature: why
                for feature, why in DeepSpeedZero0.capabilities.lacks.items()
                if feature not in (Precision.BF16, Precision.FP16)
            },
            Precision.FP16: "on a CPU its GradScaler has no kernel of DeepSpeed's",
        },
    )

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {
            **super().config(case, context),
            "bf16": {"enabled": False},
            "torch_autocast": {
                "enabled": case.precision.is_mixed,  # without, it is `deepspeed-zero0`
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
        }

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where DeepSpeed does not run under autocast."""
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        if engine.module.torch_autocast_enabled() != case.precision.is_mixed:
            raise AdapterError(f"rank {context.rank}: DeepSpeed does not heed torch_autocast in {case.precision}")
        return engine
