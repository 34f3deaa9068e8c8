"""megatron-core's own GPTModel, of which DistributedDataParallel reduces buckets of gradients while the backward pass
goes on (`overlap_grad_reduce`)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.megatron.buckets import bucket_sizes
from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_model import MegatronGPT
from meshmark.errors import AdapterError
from meshmark.spec.case import Case
from meshmark.theory.traffic import Flow, Purpose, TrafficException, exceptions_for, step_traffic

BUCKET_ELEMENTS = 10_000
"""Several of the suites' small models, which are one bucket of megatron-core's default."""


class MegatronGPTOverlap(MegatronGPT):
    """GPTModel whose gradient buckets are reduced during the backward pass. Untested with interleaved stages."""

    overlaps_reduction: ClassVar = True
    capabilities: ClassVar = dataclasses.replace(
        MegatronGPT.capabilities,
        virtual_stages=frozenset({1}),
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.dp == 1:
            return f"a reduction to overlap takes several replicas, got {case.layout.id}"
        if case.precision.is_mixed and case.layout.pp > 1:
            return f"overlap in bf16 was not tried with pipelines, got {case.layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def bucket_elements(cls, case: Case) -> int | None:
        return BUCKET_ELEMENTS

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """The number of calls shows that buckets are reduced by themselves."""
        calls = sum(cls.num_buckets(case, rank))

        def bucketed(flow: Flow) -> Flow:
            return dataclasses.replace(flow, fewest=calls, most=calls)

        flows = step_traffic(case, rank)
        return (
            *super().traffic_exceptions(case, rank),
            *exceptions_for(flows, Purpose.GRADIENTS, "every bucket is reduced when its gradients are there", bucketed),
            *exceptions_for(flows, Purpose.WEIGHTS, "every bucket is gathered by itself", bucketed),
        )

    @classmethod
    def num_buckets(cls, case: Case, rank: int) -> list[int]:
        """Return the number of buckets of each of a rank's chunks."""
        elements = cls.bucket_elements(case)
        return [len(bucket_sizes(case, rank, chunk, elements)) for chunk in range(case.layout.virtual_stages)]

    def build(self, case: Case, context: RankContext) -> Engine:
        """Build the engine, and check its settings: no measurement would show whether reductions and gathers are
        asynchronous.
        """
        engine = super().build(case, context)
        assert isinstance(engine, GPTModelEngine)
        how = [chunk.ddp_config for chunk in engine.chunks]
        asked = all(c.overlap_grad_reduce and c.overlap_param_gather == self.overlaps_gather for c in how)
        found, expected = [len(chunk.bucket_groups) for chunk in engine.chunks], self.num_buckets(case, context.rank)
        if not asked or found != expected:
            raise AdapterError(
                f"rank {context.rank}: Megatron reduces {found} buckets, expected {expected}, overlapped"
            )
        return engine
