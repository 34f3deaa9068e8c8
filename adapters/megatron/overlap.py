"""megatron-core's own GPTModel, of which DistributedDataParallel reduces buckets of gradients while the backward pass
goes on (`overlap_grad_reduce`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_model import MegatronGPT, local_sizes
from meshmark.errors import AdapterError
from meshmark.spec.case import Case
from meshmark.theory.flow import Departure, Flow, Purpose, departing
from meshmark.theory.traffic import step_traffic

BUCKET_ELEMENTS = 10_000
"""A bucket is full with the tensor that reaches so many: several of the suites' small models, which are one bucket of
the 40 million that are megatron-core's default."""


class MegatronGPTOverlap(MegatronGPT):
    """Under the distributed optimizer every bucket would be padded, and weights gathered while the next forward pass
    begins, between two steps that are judged each: left out, as are interleaved stages, which were not tried."""

    bucket_elements: ClassVar = BUCKET_ELEMENTS
    capabilities: ClassVar = dataclasses.replace(MegatronGPT.capabilities, virtual_stages=frozenset({1}))

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.dp == 1:
            return f"a reduction to overlap takes several replicas, got {case.layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def departures(cls, case: Case, rank: int) -> tuple[Departure, ...]:
        """The number of calls shows that buckets are reduced by themselves."""
        calls = sum(num_buckets(case, rank))

        def bucketed(flow: Flow) -> Flow:
            return dataclasses.replace(flow, fewest=calls, most=calls)

        reason = "every bucket is reduced as soon as its gradients are there"
        return departing(step_traffic(case, rank), Purpose.GRADIENTS, reason, bucketed)

    def build(self, case: Case, context: RankContext) -> Engine:
        """Whether reductions are asynchronous, nothing that is measured would tell."""
        engine = super().build(case, context)
        assert isinstance(engine, GPTModelEngine)
        asked = [chunk.ddp_config.overlap_grad_reduce for chunk in engine.chunks]
        found = [len(chunk.bucket_groups) for chunk in engine.chunks]
        if not all(asked) or found != (expected := list(num_buckets(case, context.rank))):
            raise AdapterError(
                f"rank {context.rank}: Megatron reduces {found} buckets, expected {expected}, overlapped"
            )
        return engine


def num_buckets(case: Case, rank: int) -> Iterator[int]:
    """Of each of a rank's chunks. Those after the first, and of a pipeline after its first rank, whose backward passes
    are over while others' are not, are one bucket each."""
    for chunk in range(case.layout.virtual_stages):
        sizes, filled, buckets = local_sizes(case, rank, range(chunk, chunk + 1)), 0, 0
        whole = chunk > 0 or case.layout.coordinates(rank).pp > 0
        for size in reversed(sizes):
            filled += size
            if not whole and filled >= BUCKET_ELEMENTS:
                buckets, filled = buckets + 1, 0
        yield buckets + (filled > 0)
