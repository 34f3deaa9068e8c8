"""ZeRO++'s hierarchical partitioning of weights (hpZ, arXiv:2306.10209): once a step has gathered them from all ranks,
every node keeps a second copy, sharded over its own ranks, and gathers from there until the step is over."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection
from typing import Any, ClassVar

import torch

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed import STAGE_3_GAPS, DeepSpeed
from meshmark.adapters.deepspeed.traffic_exceptions import zero_exceptions
from meshmark.errors import AdapterError
from meshmark.models.module import parameter_shapes
from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.traffic import Flow, OneTimeTraffic, Purpose, TrafficException, neighbours, step_traffic

NODE = 2
"""Ranks that stand for those of one node: the fewest."""


class DeepSpeedHPZ(DeepSpeed):
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        zero_stages=frozenset({3}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Feature.TIED_EMBEDDINGS: "not tried: a tied weight is gathered twice in every pass",
        },
    )
    known_gaps: ClassVar = STAGE_3_GAPS

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.dp <= NODE or case.layout.dp % NODE:
            return f"nodes of {NODE} ranks take a larger multiple of {NODE} data-parallel ranks, got {case.layout.dp}"
        return super().supports(case, device, backend)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """The second copies are made in a step's first forward pass and forgotten in its update. Those of a module's
        only tensor are what goes on the wire, and count as communication."""
        modules = Counter(name.rpartition(".")[0] for name in parameter_shapes(case.workload.model))
        copies = (
            case.precision.weights.itemsize * _padded_elements(case, {m for m, n in modules.items() if n > 1}) / NODE
        )
        return (ExtraMemory(category="activations", num_bytes=copies, reason="a node's own shards of the weights"),)

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """The node's own shards are there from the start, so that the first step gathers nothing from all ranks."""
        num_bytes = case.precision.weights.itemsize * _padded_elements(case)
        tensors = len(parameter_shapes(case.workload.model))
        near = OneTimeTraffic(
            kind="all_gather",
            steps=(0,),
            most_bytes=num_bytes,
            most_calls=tensors,
            least_bytes=-num_bytes,
            least_calls=-tensors,
            reason="the node's own shards are made with the engine: the first step gathers from them alone",
        )
        return (*super().one_time_traffic(case, rank), near)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        weights = tuple(flow for flow in step_traffic(case, rank) or () if flow.purpose is Purpose.WEIGHTS)
        found = (d for d in zero_exceptions(case, rank) if not any(f.purpose is Purpose.WEIGHTS for f in _flows(d)))
        sends = tuple(part for flow in weights for part in _twice(case, rank, flow))
        reason = "weights are gathered from all ranks once a step, and from the node's own afterwards; all padded"
        return (*found, TrafficException(sends=sends, instead_of=weights, reason=reason))

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().zero_options(case, context), "zero_hpz_partition_size": NODE}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raises `AdapterError` where DeepSpeed's nodes are others than those that traffic is planned of."""
        engine = super().build(case, context)
        from deepspeed.utils import groups

        got = torch.distributed.get_process_group_ranks(groups._get_zero_param_intra_parallel_group())
        nodes = [[*range(first, first + NODE)] for first in range(0, context.world_size, NODE)]
        if got not in nodes or context.rank not in got:
            raise AdapterError(f"rank {context.rank}: DeepSpeed's node is of ranks {got}, expected its own of {nodes}")
        return engine


def _flows(exception: TrafficException) -> tuple[Flow, ...]:
    return (*exception.sends, *exception.instead_of)


def _padded_elements(case: Case, modules: Collection[str] | None = None) -> int:
    """Return the elements of all tensors, or those of `modules`, each padded to a multiple of the ranks."""
    shapes = parameter_shapes(case.workload.model).items()
    sizes = [math.prod(shape) for name, shape in shapes if modules is None or name.rpartition(".")[0] in modules]
    return sum(n + -n % case.layout.dp for n in sizes)


def _twice(case: Case, rank: int, flow: Flow) -> tuple[Flow, Flow]:
    """From all ranks in the first forward pass, from the node's in every other pass."""
    again, tensors = 2 * case.layout.num_micro_batches - 1, len(parameter_shapes(case.workload.model))
    num_bytes = case.precision.weights.itemsize * _padded_elements(case)
    near = neighbours(flow, case.layout.dp // NODE, rank)
    return (
        dataclasses.replace(flow, num_bytes=num_bytes, fewest=1, most=tensors),
        dataclasses.replace(flow, ranks=near, num_bytes=again * num_bytes, fewest=again, most=again * tensors),
    )
