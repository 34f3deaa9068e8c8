"""megatron-core as its authors run it: what its guide of performance and Megatron-LM's scripts turn on for replicas."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshmark.adapter.contract import Track
from meshmark.adapters.megatron.buckets import default_elements
from meshmark.adapters.megatron.gpt_model import ELEMENT_WISE_MASTERS, MegatronGPTDistributedOptimizer
from meshmark.adapters.megatron.overlap import MegatronGPTOverlap
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision


class MegatronGPTRecommended(MegatronGPTOverlap):
    """The distributed optimizer, `overlap_grad_reduce` and `overlap_param_gather`, buckets of its default; on CUDA, one
    connection, and biases fused into activations and residual sums. Fusions that take Apex, Transformer Engine or
    Megatron-LM's own extensions (gradient accumulation, softmax, rotation, persistent norms) stay off."""

    track: ClassVar = Track.AUTHORS
    overlaps_gather: ClassVar = True
    fuses: ClassVar = True
    capabilities: ClassVar = dataclasses.replace(
        MegatronGPTOverlap.capabilities,
        zero_stages=frozenset({1}),
        precisions=frozenset({Precision.FP32}),
        lacks={**MegatronGPTOverlap.capabilities.lacks, Precision.BF16: ELEMENT_WISE_MASTERS},
    )
    known_gaps: ClassVar = MegatronGPTDistributedOptimizer.known_gaps

    @classmethod
    def bucket_elements(cls, case: Case) -> int | None:
        return default_elements(case.layout.dp)
