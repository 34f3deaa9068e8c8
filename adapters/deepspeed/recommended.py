"""DeepSpeed as its authors recommend it: the documented defaults of `zero_optimization`, with overlap as in its ZeRO
tutorial. Stage 3 looks ahead, keeps what is used again, and never shards what is small."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from meshmark.adapter.contract import Feature, Track
from meshmark.adapter.engine import Engine, Holdings, RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.traffic_exceptions import zero_exceptions
from meshmark.errors import AdapterError
from meshmark.models.module import parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import bucket_elements
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, OneTimeTraffic, Purpose, TrafficException, exceptions_for, step_traffic

BUCKET_ELEMENTS = 500_000_000
"""`reduce_bucket_size`; allocated whole, whatever the model."""
PERSISTENT_ELEMENTS = 100_000
"""`stage3_param_persistence_threshold`: tensors up to this are whole on every rank."""


_NARROW = (
    "its defaults sum the gradients of micro-batches, and reduce them, in {}: no precision of Meshmark's sums "
    "micro-batches so, and neither the twin nor a noise floor does; `deepspeed` asks for float32 in both"
)


class RecommendedEngine(DeepSpeedEngine):
    def holdings(self) -> Holdings:
        """Between steps small parameters are there whole beside their shards."""
        held = super().holdings()
        sharded = [p for _, p in self.named_parameters() if hasattr(p, "ds_tensor")]
        whole = [p.detach() for p in sharded if p.ds_persist and p.numel() == p.ds_numel]  # type: ignore[attr-defined]
        return dataclasses.replace(held, parameters=[*held.parameters, *whole])


class DeepSpeedRecommended(DeepSpeed):
    engine: ClassVar = RecommendedEngine
    track: ClassVar = Track.AUTHORS
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Precision.BF16: _NARROW.format("bf16"),
            Precision.BF16_REDUCE_BF16: _NARROW.format("bf16"),
            Precision.FP16: _NARROW.format("fp16"),
            Feature.TIED_EMBEDDINGS: "not tried: whether a tied weight is small decides how often it is gathered",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Stage 2 fills two buckets by turns."""
        using = super().recipe(case)
        if case.layout.zero_stage != 2:
            return using
        two = dataclasses.replace(using.backward, bucket_elements=BUCKET_ELEMENTS, num_buckets=2)
        return dataclasses.replace(using, backward=two)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        stage, model = case.layout.zero_stage, case.workload.model
        more = 4.0 * (BUCKET_ELEMENTS - bucket_elements(model))
        bucket = ExtraMemory(
            category="steady" if stage == 3 else "peak",
            num_bytes=more,
            reason="the bucket is allocated whole, 5e8 elements whatever the model",
        )
        if stage < 3:
            return (*super().extra_memory(case, rank), *([bucket] if stage == 1 else []))
        small, _ = _padded_elements(case)
        beside = 4.0 * small.unpadded if case.layout.dp > 1 else 0.0  # a whole tensor is the only shard itself
        reason = "tensors of up to 1e5 elements are whole on every rank, beside their shards"
        whole = ExtraMemory(category="parameters", num_bytes=beside, reason=reason)
        return (bucket, whole, *cls._padding(case, rank))

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Until the order of modules is recorded, which takes a micro-batch, weights are given up after every use.

        So the first micro-batch gathers small parameters for its forward and again for its backward pass, and the
        second one once more, before they stay; and large ones twice in place of once.
        """
        found = super().one_time_traffic(case, rank)
        if case.layout.zero_stage < 3:
            return found
        small, large = _padded_elements(case)
        times = min(case.layout.num_micro_batches + 1, 3)
        again = OneTimeTraffic(
            kind="all_gather",
            steps=(0,),
            most_bytes=case.precision.weights.itemsize * (times * small.elements + large.elements),
            most_calls=times * small.tensors + large.tensors,
            reason="weights are given up after every use until the order of modules is recorded",
        )
        return (*found, again)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        found = zero_exceptions(case, rank)
        if case.layout.zero_stage < 3:
            return found
        small, large = _padded_elements(case)
        rounds, width = case.layout.num_micro_batches, case.precision.weights.itemsize

        def gathered(flow: Flow) -> Flow:
            return dataclasses.replace(
                flow,
                num_bytes=width * (small.elements + rounds * large.elements),
                fewest=bool(small.tensors) + rounds * bool(large.tensors),
                most=small.tensors + rounds * large.tensors,
            )

        reason = "small parameters are gathered once a step, others once a micro-batch; all padded"
        others = (d for d in found if not any(flow.purpose is Purpose.WEIGHTS for flow in (*d.sends, *d.instead_of)))
        return (*others, *exceptions_for(step_traffic(case, rank), Purpose.WEIGHTS, reason, gathered))

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        """The tutorial's stage 1 names nothing that is not a default; stage 3 overlaps by default."""
        return {"overlap_comm": True} if case.layout.zero_stage == 2 else {}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Build the engine, and check that stage 2 overlaps, which no measurement would show."""
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        if (asked := case.layout.zero_stage > 1) != engine.module.zero_overlap_comm():
            raise AdapterError(f"rank {context.rank}: DeepSpeed's overlap_comm is {not asked}, expected {asked}")
        return engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensors:
    tensors: int
    elements: int
    """Padded to a multiple of the ranks."""
    unpadded: int


def _padded_elements(case: Case) -> tuple[_Tensors, _Tensors]:
    """Return the padded elements of the tensors that are never sharded, and of the others."""
    sizes = [math.prod(shape) for shape in parameter_shapes(case.workload.model).values()]
    dp = case.layout.dp

    def of(chosen: list[int]) -> _Tensors:
        return _Tensors(tensors=len(chosen), elements=sum(n + -n % dp for n in chosen), unpadded=sum(chosen))

    return of([n for n in sizes if n <= PERSISTENT_ELEMENTS]), of([n for n in sizes if n > PERSISTENT_ELEMENTS])
