"""megatron-core's pipelines by the other ways of cutting a model: stages of unequal numbers of layers, and a chunk
whose weights are gathered while others are still updated."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.megatron.buckets import bucket_sizes, stage_blocks
from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_model import MegatronGPT
from meshmark.adapters.megatron.options import MegatronGPTAligned
from meshmark.adapters.megatron.overlap import MegatronGPTOverlap
from meshmark.errors import AdapterError
from meshmark.spec.case import Case
from meshmark.spec.layout import Schedule
from meshmark.spec.precision import Precision
from meshmark.theory.traffic import OneTimeTraffic


class MegatronGPTUneven(MegatronGPT):
    """`num_layers_in_first_pipeline_stage` and `num_layers_in_last_pipeline_stage`, for layers that stages do not
    divide: the first stages have one more."""

    capabilities: ClassVar = dataclasses.replace(
        MegatronGPT.capabilities,
        schedules=frozenset({Schedule.ONE_F_ONE_B}),
        virtual_stages=frozenset({1}),
        precisions=frozenset({Precision.FP32}),
        lacks={**MegatronGPT.capabilities.lacks, Precision.BF16: "not tried"},
    )

    @classmethod
    def refusal_of_stages(cls, case: Case) -> str | None:
        """Between the first stage and the last, Megatron cuts equal ones."""
        layout, layers = case.layout, case.workload.model.num_layers
        stages = [len(stage_blocks(case, place)) for place in range(layout.pp)]
        if layout.pp == 1 or layers % layout.pp == 0 or len({*stages[1:-1]}) > 1 or 0 in stages:
            return f"{case.adapter} takes stages of which the first or the last differs, got {layers} on {layout.pp}"
        return None

    def model_options(self, case: Case) -> dict[str, Any]:
        first, last = stage_blocks(case, 0), stage_blocks(case, case.layout.pp - 1)
        return {"num_layers_in_first_pipeline_stage": len(first), "num_layers_in_last_pipeline_stage": len(last)}


class GathersEarlyEngine(GPTModelEngine):
    def update(self) -> Tensor | None:
        """Step, and on a CPU wait until the first chunk is gathered.

        Otherwise gloo's buffers live until the other replica begins the gather, which no memory plan can predict.
        """
        norm = super().update()
        if self.context.device.type == "cpu":
            for group in self.chunks[0].bucket_groups:
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
        return norm


class MegatronGPTGathersEarly(MegatronGPTAligned):
    """`overlap_param_gather_with_optimizer_step`: a rank's first chunk is updated before the others, and its weights
    are gathered while these are updated. Stages are not aligned."""

    engine: ClassVar = GathersEarlyEngine
    capabilities: ClassVar = dataclasses.replace(
        MegatronGPTAligned.capabilities, schedules=frozenset({Schedule.INTERLEAVED}), virtual_stages=frozenset({2})
    )

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Before the first step nothing has gathered the first chunk, so that its own forward pass does."""
        buckets = bucket_sizes(case, rank, 0, cls.bucket_elements(case))
        reason = "the first forward pass gathers the first chunk's weights, which later come from the step before"
        once = OneTimeTraffic(
            kind="all_gather",
            steps=(0,),
            most_bytes=sum(buckets) * case.precision.weights.itemsize,
            most_calls=len(buckets),
            reason=reason,
        )
        return (*super().one_time_traffic(case, rank), once)

    def reduction_options(self, case: Case) -> dict[str, Any]:
        return {}

    def optimizer_options(self, case: Case) -> dict[str, Any]:
        return {"overlap_param_gather_with_optimizer_step": True}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Build the engine. Raises `AdapterError` unless the first chunk alone has an optimizer of its own."""
        engine = MegatronGPTOverlap.build(self, case, context)
        assert isinstance(engine, GPTModelEngine)
        early = [chunk.overlap_param_gather_with_optimizer_step for chunk in engine.chunks]
        if early != [True, False] or len(engine.pytorchs_optimizers()) != len(early):
            raise AdapterError(f"rank {context.rank}: Megatron gathers chunks early: {early}, expected the first alone")
        return engine
