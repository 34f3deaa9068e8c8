"""DeepSpeed's other checkpoints: elastic, loaded by one rank after the other, and universal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import TAG, DeepSpeedEngine
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.precision import Precision


class ElasticEngine(DeepSpeedEngine):
    def load(self, folder: Path) -> None:
        self.read(folder, TAG)


class DeepSpeedElastic(DeepSpeed):
    """`elastic_checkpoint` of stages 1 and 2, whose states are merged and cut again when they are loaded, and masters
    taken from the weights (`load_from_fp32_weights: false`); of stage 3 `pipeline_loading_checkpoint`."""

    engine: ClassVar = ElasticEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Precision.BF16: "masters are made of weights, which are bf16",
            Precision.FP16: "masters are made of weights, which are fp16",
            Feature.RESHARD: "DeepSpeed refuses another world size (\"Automatic adjustment of ZeRO's optimizer state "
            'partitioning with a new world size is not currently supported")',
        },
    )

    known_gaps: ClassVar = (
        *DeepSpeed.known_gaps,
        *(
            KnownGap(
                clause=clause,
                zero_stages=(1, 2),
                symptom="AssertionError",
                reason="an elastic checkpoint of PyTorch's optimizers, which count steps by parameter, is not loaded: "
                "DeepSpeed asserts a count by group",
                reproducer="deepspeed_elastic_checkpoint",
            )
            for clause in ("resume", "recovery")
        ),
    )

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        choices = (
            {"pipeline_loading_checkpoint": True}
            if case.layout.zero_stage == 3
            else {"elastic_checkpoint": True, "load_from_fp32_weights": False}
        )
        return {**super().zero_options(case, context), **choices}


class UniversalEngine(DeepSpeedEngine):
    def load(self, folder: Path) -> None:
        self.load_universal(folder)


class DeepSpeedUniversal(DeepSpeed):
    """`checkpoint: {load_universal: true}`: what is loaded is a universal checkpoint, for the same world size too."""

    engine: ClassVar = UniversalEngine

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().config(case, context), "checkpoint": {"load_universal": True}}
