"""DeepSpeed without ZeRO: every rank holds the whole model, and its engine reduces gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import DataParallelEngine, Holdings
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import TAG, DeepSpeedEngine
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException


class ReplicatedEngine(DeepSpeedEngine):
    """Nothing is sharded, so all is where PyTorch keeps it."""

    def parameters(self) -> Mapping[str, Tensor]:
        return DataParallelEngine.parameters(self)

    def gradients(self) -> Mapping[str, Tensor]:
        return DataParallelEngine.gradients(self)

    def holdings(self) -> Holdings:
        return DataParallelEngine.holdings(self)

    def load(self, folder: Path) -> None:
        """Optimizer states are in the same file as the model."""
        self.read(folder, TAG)


class DeepSpeedZero0(DeepSpeed):
    engine: ClassVar = ReplicatedEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        zero_stages=frozenset({0}),
        precisions=frozenset({Precision.FP32}),
        unfreezes=True,
        lacks={
            Precision.FP64: "its configuration knows no float64",
            Precision.BF16: "without ZeRO it accumulates gradients in bf16, and refuses float32 "
            '("unsupported mix of model_dtype and grad_accum_dtype")',
            Precision.FP16: "without ZeRO it accumulates gradients in fp16, and refuses float32",
            Precision.BF16_REDUCE_BF16: "without ZeRO it accumulates gradients in bf16, and refuses float32",
            Feature.RESHARD: "universal checkpoints are ZeRO's",
        },
    )
    known_gaps: ClassVar = (
        KnownGap(
            clause="unused",
            symptom="as if unused parameters had a gradient of zero",
            reason="a parameter without a gradient is given one of zero to be reduced: its moments decay, and momentum "
            "and weight decay move it",
            reproducer="deepspeed_unused_momentum",
        ),
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-deepspeed-0")

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return ()

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        ranks = case.layout.group("dp", rank)
        if len(ranks) == 1 or case.workload.optimizer.clip_norm is None:
            return ()
        agreed = Flow(kind="all_reduce", axes="dp", ranks=ranks, purpose=Purpose.NORM, num_bytes=4, fewest=1, most=1)
        return (
            TrafficException(sends=(agreed,), reason="ranks average the norm, which each has of the whole gradient"),
        )
