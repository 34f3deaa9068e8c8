"""Pipelines that do not wait (PipeDream, arXiv:1806.03377; PipeDream-2BW, arXiv:2006.09503; PipeMare,
arXiv:1910.05124), between processes: ours, for no kept library does it. What is sent where is 1F1B's."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshmark.adapter.contract import Capabilities, Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.pipedream.engines import PipeDreamEngine, VerticalEngine
from meshmark.adapters.pipedream.mare import PipeMareEngine
from meshmark.adapters.pipedream.two_buffered import TwoBufferedEngine
from meshmark.adapters.pipeline import NO_IMAGES, Pipeline, PipelineEngine
from meshmark.algorithms import pipedream
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Schedule
from meshmark.spec.precision import Precision
from meshmark.theory.recipe import TrainingRecipe

ENGINES: dict[str, type[PipelineEngine]] = {
    pipedream.PipeDream.kind: PipeDreamEngine,
    pipedream.PipeDreamVertical.kind: VerticalEngine,
    pipedream.PipeDream2BW.kind: TwoBufferedEngine,
    pipedream.PipeMare.kind: PipeMareEngine,
}


class PipeDream(Pipeline):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"pp"}),
        schedules=frozenset({Schedule.ONE_F_ONE_B}),
        families=TEXT_FAMILIES,
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        algorithms=frozenset(one.kind for one in pipedream.ALGORITHMS),
        lacks={
            **Pipeline.capabilities.lacks,
            **NO_IMAGES,
            Family.MIXTURE: "which experts are chosen was not tried of several versions of the weights",
            Family.OWN: "not tried of several versions of the weights",
            Precision.BF16: "its gradients would be held against a twin of one set of weights",
            Feature.TIED_EMBEDDINGS: "two stages would hold two versions of one weight",
            Feature.UNUSED: "a micro-batch makes an update of every weight",
            Feature.DROPOUT: "its masks are judged at one set of weights",
            Feature.RESHARD: "older versions are saved by rank",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return the recipe. No peak is planned for stashed versions."""
        own_loop = case.workload.algorithm.updates_by_micro_batch
        return dataclasses.replace(super().recipe(case), activations_known=False, receive_buffers=not own_loop)

    def build(self, case: Case, context: RankContext) -> Engine:
        return ENGINES[case.workload.algorithm.kind](case, context)
