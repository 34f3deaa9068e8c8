"""Where DeepSpeed sends otherwise than ZeRO's closed form (arXiv:1910.02054, section 7)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from meshmark.models.module import parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Recompute
from meshmark.spec.precision import Dtype
from meshmark.theory.model_theory import theory_of
from meshmark.theory.traffic import (
    Flow,
    OneTimeTraffic,
    Purpose,
    TrafficException,
    besides,
    exceptions_for,
    scalar_flows,
    step_traffic,
)

WHOLE_BUCKETS = "`use_multi_rank_bucket_allreduce`, the default: all-reduced, 1.5 times ZeRO's bytes on a ring"
"""Why gradients of stages 1 and 2 are all-reduced."""


def keeps_whole_gradients(case: Case) -> bool:
    """In bf16, stage 1 is `BF16_Optimizer`, unless it is offloaded."""
    layout = case.layout
    return case.precision.compute is Dtype.BF16 and layout.zero_stage == 1 and layout.offload is Offload.NONE


def state_shards(layout: Layout, rank: int) -> tuple[int, int]:
    """Over how many ranks states are sharded, those of a sequence too, and which shard is this rank's."""
    ranks = layout.spanned(("dp", "cp"), rank)
    return len(ranks), ranks.index(rank)


def sizes_by_group(case: Case, sizes: Sequence[int]) -> list[list[int]]:
    """Return the sizes of a model's tensors by the optimizer's groups, each of which is partitioned by itself."""
    groups: dict[bool, list[int]] = {True: [], False: []}
    for name, size in zip(parameter_shapes(case.workload.model), sizes, strict=True):
        groups[case.workload.optimizer.decays(name)].append(size)
    return [group for group in groups.values() if group]


def zero_exceptions(case: Case, rank: int) -> tuple[TrafficException, ...]:
    flows = step_traffic(case, rank) or []
    sizes = [math.prod(shape) for shape in parameter_shapes(case.workload.model).values()]
    return (*sharing_exceptions(case, rank, flows, sizes), *_norm(case, rank, flows), *_overflow(case, rank, flows))


def compared_orders(case: Case) -> tuple[OneTimeTraffic, ...]:
    """Return what stage 3 sends to see that all ranks use modules and parameters in the same order.

    Rank 0 broadcasts the order of modules twice, that of parameters, and when each was used last, each with its length
    (`PartitionedParameterCoordinator.reset_step`, until an order is recorded): numbers of 8 bytes. It does so after the
    first two micro-batches, which may be those of two steps.
    """
    if case.layout.zero_stage < 3:
        return ()
    count = len(parameter_shapes(case.workload.model))
    most = 4 + 4 * _USES * case.workload.model.runs * count
    reason = "until they have recorded in which order modules use weights, ranks see whether theirs is rank 0's"
    steps = (0, 1) if case.layout.num_micro_batches == 1 else (0,)
    return (
        OneTimeTraffic(kind="broadcast", steps=steps, most_bytes=8 * most, most_calls=8, reason=reason),
        *_found_elsewhere(case),
    )


def _found_elsewhere(case: Case) -> tuple[OneTimeTraffic, ...]:
    """Return what the first step gathers until stage 3 knows which weights are used outside their modules.

    It gathers such a weight where it is read, and then with the module that reads it (`register_external_parameter`).
    """
    model = case.workload.model
    if not model.reads_elsewhere:
        return ()
    shapes = parameter_shapes(model).values()
    times = 2 * case.layout.num_micro_batches  # in a forward and a backward pass of each
    num_bytes = times * case.precision.weights.itemsize * sum(math.prod(shape) for shape in shapes)
    reason = "weights that a function of another module uses are gathered where it reads them, until that is known"
    return (OneTimeTraffic(kind="all_gather", steps=(0,), most_bytes=num_bytes, most_calls=len(shapes), reason=reason),)


_USES = 4
"""Uses of a parameter or its module in one micro-batch: forward, backward, and one more of each if it is
recomputed.
"""


def sharing_exceptions(case: Case, rank: int, flows: list[Flow], sizes: list[int]) -> tuple[TrafficException, ...]:
    """From `flows` of gradients and weights, of tensors of these `sizes` on every rank."""
    shards, _ = state_shards(case.layout, rank)
    if case.layout.zero_stage == 3:
        return _sharded(case, flows, shards, sizes)
    return _partitioned(case, flows, shards, sizes)


def _partitioned(case: Case, flows: list[Flow], shards: int, sizes: list[int]) -> tuple[TrafficException, ...]:
    """Stages 1 and 2, which make one flat buffer of each group's tensors."""
    layout = case.layout
    rounds = layout.num_micro_batches if layout.zero_stage == 2 else 1
    padding = Fraction(sum(-sum(group) % (2 * shards) for group in sizes_by_group(case, sizes)), sum(sizes))
    times = 1 + padding if keeps_whole_gradients(case) else rounds  # flat, with the padding of its partitions

    def reduced(flow: Flow) -> Flow:
        return dataclasses.replace(
            flow, kind="all_reduce", num_bytes=int(times * flow.num_bytes), fewest=rounds, most=rounds * flow.most
        )

    reason = WHOLE_BUCKETS
    if rounds > 1:
        reason += ", after every micro-batch"
    width = Fraction(case.precision.weights.itemsize, case.precision.master.itemsize)
    padded = "partitions are padded to an even number of elements"
    low = exceptions_for(
        flows,
        Purpose.WEIGHTS,
        "the weights that the products read are gathered, not the masters",
        lambda flow: dataclasses.replace(flow, num_bytes=int(flow.num_bytes * width)),
    )
    return (
        *exceptions_for(flows, Purpose.GRADIENTS, reason, reduced),
        *(low if width != 1 else ()),
        *besides(flows, Purpose.WEIGHTS, padding * width, padded),
    )


def _sharded(case: Case, flows: list[Flow], shards: int, sizes: list[int]) -> tuple[TrafficException, ...]:
    """Stage 3."""
    padding = Fraction(sum(-size % shards for size in sizes), sum(sizes))
    reason = "parameters are padded to a multiple of the ranks"
    return (
        *besides(flows, Purpose.GRADIENTS, padding, reason),
        *besides(flows, Purpose.WEIGHTS, padding, reason),
        *_for_modules(case, flows, shards),
        *(_recomputed(case, flows, shards) if case.layout.recompute is Recompute.FULL else ()),
    )


def _recomputed(case: Case, flows: list[Flow], shards: int) -> tuple[TrafficException, ...]:
    """Return the gathers of modules for running a block again.

    There are none if a module's backward pass, which has gathered its weights, starts the recomputation.
    """
    found, width = theory_of(case.workload.model).recomputed_gathers(), case.precision.weights.itemsize
    rounds = case.layout.num_micro_batches
    more = sum((size + -size % shards) * times for size, times in found) * rounds * width
    own = (flow for flow in flows if flow.purpose is Purpose.WEIGHTS)
    sends = tuple(dataclasses.replace(flow, num_bytes=more, fewest=0, most=len(found) * rounds) for flow in own)
    reason = "weights are gathered once more, to compute blocks again"
    return (TrafficException(sends=sends, reason=reason),) if sends and found else ()


def _for_modules(case: Case, flows: list[Flow], shards: int) -> tuple[TrafficException, ...]:
    """Stage 3 gathers for each module, and releases after it; in the backward pass only of modules whose inputs have a
    gradient (`PostBackwardFunctionModule` of parameter_offload.py), so that an embedding's weight stays."""
    gathers, width = case.workload.model.gathers, case.precision.weights.itemsize
    rounds = case.layout.num_micro_batches
    more = sum((size + -size % shards) * times for size, times in gathers) * rounds * width
    calls = sum(max(times, 0) for _, times in gathers) * rounds
    own = (flow for flow in flows if flow.purpose is Purpose.WEIGHTS)
    sends = tuple(dataclasses.replace(flow, num_bytes=more, fewest=0, most=calls) for flow in own)
    reason = "weights are gathered for each module that reads them"
    return (TrafficException(sends=sends, reason=reason),) if sends and gathers else ()


def _norm(case: Case, rank: int, flows: list[Flow]) -> tuple[TrafficException, ...]:
    """Return the reductions of norms, one for each optimizer group. They are made even if nothing is clipped."""
    if keeps_whole_gradients(case):
        return exceptions_for(flows, Purpose.NORM, "BF16_Optimizer keeps whole gradients on every rank")
    width = 8 if case.layout.zero_stage == 3 and case.layout.offload is Offload.NONE else 4
    groups = 1 + case.workload.optimizer.groups_decay

    def of_groups(flow: Flow) -> Flow:
        return dataclasses.replace(flow, num_bytes=width * groups, fewest=groups, most=groups)

    if case.workload.optimizer.clip_norm is None:
        told = tuple(map(of_groups, scalar_flows(case, rank, Purpose.NORM, width)))
        return (TrafficException(sends=told, reason="the norm is computed though nothing is clipped"),) if told else ()
    if width == 4 and groups == 1:
        return ()
    reasons = ["squares of norms are summed in float64"] if width == 8 else []
    reasons += ["each group of parameters has a norm of its own"] if groups > 1 else []
    return exceptions_for(flows, Purpose.NORM, "; ".join(reasons), of_groups)


def _overflow(case: Case, rank: int, flows: list[Flow]) -> tuple[TrafficException, ...]:
    """Return the reductions of the overflow flag. Up to stage 2 it is reduced in bf16 too."""
    told = tuple(scalar_flows(case, rank, Purpose.OVERFLOW, 1))
    asks = case.layout.zero_stage < 3 and not keeps_whole_gradients(case)
    if asks and case.precision.compute is Dtype.BF16 and told:
        return (TrafficException(sends=told, reason="gradients are searched for overflows in bf16 too"),)
    reason = "the flag is one byte"
    return exceptions_for(flows, Purpose.OVERFLOW, reason, lambda flow: dataclasses.replace(flow, num_bytes=1))
