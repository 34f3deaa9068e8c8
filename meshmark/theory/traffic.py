"""Closed forms of one rank's communication in one optimizer step: kind, ranks, calls and bytes.

Bytes are those of full tensors, as a framework requests them. `wire_factor` of `meshmark.measure.readings` converts
them to bytes sent under ring algorithms. The number of calls is fixed if the algorithm fixes it, and bounded where a
framework may split or join tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshmark.spec.case import Case
from meshmark.spec.layout import Axis, Layout, Recompute
from meshmark.spec.precision import LossScaling
from meshmark.theory.flow import Flow, Purpose, TrafficException, exceptions_for
from meshmark.theory.model_theory import theory_of
from meshmark.theory.partition import held_stage

METERED_STEP = 2
"""The step, counted from 0, whose traffic is planned and metered, because the steps of an algorithm may differ."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that one rank acts together with."""

    axes: str
    """Mesh axes, joined by +."""
    ranks: tuple[int, ...]

    @classmethod
    def along(cls, layout: Layout, rank: int, axes: tuple[Axis, ...]) -> Group:
        long = tuple(axis for axis in axes if getattr(layout, axis) > 1)
        return cls(axes="+".join(long), ranks=layout.spanned(long, rank))


def _collective(group: Group, kind: str, purpose: Purpose, num_bytes: int, calls: tuple[int, int]) -> list[Flow]:
    """Return a collective, or nothing in a group of one. `calls` is the least and the largest number."""
    fewest, most = calls
    flow = Flow(
        kind=kind,
        axes=group.axes,
        ranks=group.ranks,
        purpose=purpose,
        num_bytes=num_bytes,
        fewest=fewest,
        most=most,
    )
    return [flow] if len(group.ranks) > 1 else []


REPLICAS: tuple[Axis, ...] = ("dp", "cp")
"""Axes along which ranks hold, or share, the same parameters."""


def parameter_sizes(case: Case, rank: int) -> tuple[int, int]:
    """Return the number of parameters, and of the tensors that they are in."""
    theory = theory_of(case.workload.model)
    count, tensors = theory.num_parameters(case.layout, rank), theory.num_tensors(case.layout, rank)
    assert count is not None and tensors is not None, "step_traffic leaves out what is not planned"
    return count, tensors


def reductions(
    case: Case, rank: int, purpose: Purpose, num_bytes: int, calls: tuple[int, int], *, kind: str = "all_reduce"
) -> list[Flow]:
    """Return a collective over the ranks that hold the same parameters.

    `calls` is the least and the largest number.
    """
    return _collective(Group.along(case.layout, rank, REPLICAS), kind, purpose, num_bytes, calls)


def data_parallel_traffic(case: Case, rank: int) -> list[Flow]:
    """Return the reduction of gradients and the gathering of weights over the data- and context-parallel ranks.

    There is one all-reduce per step, or under ZeRO a reduce-scatter and an all-gather (arXiv:1910.02054, section 7: 2P
    elements up to stage 2, 3P at stage 3). At stage 3, as in FSDP, weights are gathered as the products read them, for
    every micro-batch's forward and again for its backward pass. Gradients are reduced after every micro-batch, so that
    they stay sharded.
    """
    if (own := case.workload.algorithm.traffic(case, rank)) is not None:
        return own
    precision, stage, replicas = case.precision, case.layout.zero_stage, Group.along(case.layout, rank, REPLICAS)
    count, tensors = parameter_sizes(case, rank)
    rounds = case.layout.num_micro_batches if stage == 3 else 1
    reduced = rounds * count * precision.reduction.itemsize
    kind = "reduce_scatter" if stage else "all_reduce"
    flows = _collective(replicas, kind, Purpose.GRADIENTS, reduced, (rounds, rounds * tensors))
    if stage:
        times, width = (2 * rounds, precision.weights) if stage == 3 else (1, precision.master)
        gathered, calls = times * count * width.itemsize, (times, times * tensors)
        flows += _collective(replicas, "all_gather", Purpose.WEIGHTS, gathered, calls)
    return flows


def scalar_flows(case: Case, rank: int, purpose: Purpose, num_bytes: int) -> list[Flow]:
    """Return one all-reduce of a scalar over all ranks that share one replica's gradients."""
    axes: tuple[Axis, ...] = ("tp", "pp", *(REPLICAS if case.layout.zero_stage else ()))
    return _collective(Group.along(case.layout, rank, axes), "all_reduce", purpose, num_bytes, (1, 1))


def scalar_traffic(case: Case, rank: int) -> list[Flow]:
    """Return the all-reduces of the clipping norm and, under loss scaling, of the overflow flag."""
    width, clips = case.precision.wide.itemsize, case.workload.optimizer.clip_norm is not None
    scales = case.precision.loss_scaling is not LossScaling.NONE
    return [
        *(scalar_flows(case, rank, Purpose.NORM, width) if clips else []),
        *(scalar_flows(case, rank, Purpose.OVERFLOW, width) if scales else []),
    ]


def stream_bytes(case: Case) -> int:
    """Return the bytes of the residual stream of all tokens that a rank computes in a step."""
    layout, workload = case.layout, case.workload
    return (
        workload.tokens_per_step // (layout.dp * layout.cp) * workload.text_model.hidden * case.precision.wide.itemsize
    )


def tensor_parallel_traffic(case: Case, rank: int) -> list[Flow]:
    """Return the tensor-parallel traffic of all micro-batches.

    A block has four all-reduces of B x T x C, two forward and two backward (arXiv:1909.08053, section 3), and two more
    with recomputation. The first stage has one for the embedding. The last stage has one for the gradient of the
    head's input, and three scalars per token for the vocabulary-parallel loss.
    """
    layout, workload = case.layout, case.workload
    if layout.tp == 1:
        return []
    if (sends := theory_of(workload.model).tensor_parallel_sends(case, rank, METERED_STEP)) is not None:
        along = Group.along(layout, rank, ("tp",))
        return [
            flow
            for kind, num_bytes, calls in sends
            for flow in _collective(along, kind, Purpose.ACTIVATIONS, num_bytes, (calls, calls))
        ]
    stage = held_stage(workload.transformer, layout, rank)
    blocks = 6 if layout.recompute is Recompute.FULL else 4
    times = blocks * stage.num_layers + stage.has_embedding + stage.has_head
    num_bytes, calls = times * stream_bytes(case), times * layout.num_micro_batches
    group = Group.along(layout, rank, ("tp",))
    flows = _collective(group, "all_reduce", Purpose.ACTIVATIONS, num_bytes, (calls, calls))
    if stage.has_loss:
        scalars = 3 * stream_bytes(case) // workload.transformer.hidden
        calls = 3 * layout.num_micro_batches
        flows += _collective(group, "all_reduce", Purpose.LOSS, scalars, (calls, calls))
    return flows


def messages(
    axis: Axis,
    kind: str,
    ranks: tuple[int, int],
    num_bytes: int,
    calls: tuple[int, int],
    purpose: Purpose = Purpose.ACTIVATIONS,
) -> Flow:
    return Flow(
        kind=kind,
        axes=axis,
        ranks=(min(ranks), max(ranks)),
        purpose=purpose,
        num_bytes=num_bytes,
        fewest=calls[0],
        most=calls[1],
    )


def pipeline_traffic(case: Case, rank: int) -> list[Flow]:
    """Return the pipeline traffic: one message per micro-batch over every boundary between two stages.

    The residual stream goes forward and its gradient backward (GPipe, arXiv:1811.06965, section 2.2), also between
    virtual stages (arXiv:2104.04473, section 2.2.2). The first and the last stage, which both hold a tied weight, sum
    its gradient.
    """
    layout, model = case.layout, case.workload.model
    if layout.pp == 1:
        return []
    line, stage = layout.group("pp", rank), layout.coordinates(rank).pp
    boundaries: dict[int, list[int]] = {}
    for boundary in range(layout.pp * layout.virtual_stages - 1):
        ends = {layout.pipeline_rank(boundary), layout.pipeline_rank(boundary + 1)}
        if stage in ends and len(ends) > 1:
            peer = line[(ends - {stage}).pop()]
            boundaries.setdefault(peer, []).append(_boundary_bytes(case, boundary))
    flows = []
    for peer, sizes in boundaries.items():
        calls = len(sizes) * layout.num_micro_batches
        flows += [messages("pp", kind, (rank, peer), sum(sizes), (calls, calls)) for kind in ("send", "recv")]
    if model.ties_ends and stage in (0, layout.pp - 1) and not layout.folded:
        flows.append(_tied_weight(case, (line[0], line[-1])))
    return flows


def _boundary_bytes(case: Case, boundary: int) -> int:
    """Return the bytes of all rows of a step that cross the boundary after one stage."""
    layout, workload = case.layout, case.workload
    theory = theory_of(workload.model)
    if theory.stream:
        return stream_bytes(case)
    each = theory.boundary_numbers(layout.pp * layout.virtual_stages, boundary)
    assert each is not None, "step_traffic leaves out what is not planned"
    return workload.global_batch // layout.dp * each * case.precision.wide.itemsize


def _tied_weight(case: Case, ranks: tuple[int, int]) -> Flow:
    model = case.workload.transformer
    return Flow(
        kind="all_reduce",
        axes="pp",
        ranks=ranks,
        purpose=Purpose.TIED_WEIGHT,
        num_bytes=model.vocab_size * model.hidden // case.layout.tp * case.precision.wide.itemsize,
        fewest=1,
        most=1,
    )


def context_parallel_traffic(case: Case, rank: int) -> list[Flow]:
    """Return the traffic of ring attention (arXiv:2310.01889 sec. 3).

    In each of cp - 1 hops a rank passes on a block of keys and one of values, and in the backward pass also their
    gradients, in one message or in separate ones.
    """
    layout = case.layout
    if layout.cp == 1:
        return []
    model = case.workload.transformer
    ring, index = layout.group("cp", rank), layout.coordinates(rank).cp
    layers = held_stage(model, layout, rank).num_layers
    hops = (layout.cp - 1) * layers
    sent = 6 * hops * (stream_bytes(case) // model.hidden) * model.kv_hidden // layout.tp
    calls = 2 * hops * layout.num_micro_batches, 6 * hops * layout.num_micro_batches
    after, before = ring[(index + 1) % layout.cp], ring[index - 1]
    return [
        messages("cp", "send", (rank, after), sent, calls),
        messages("cp", "recv", (before, rank), sent, calls),
    ]


def step_traffic(case: Case, rank: int) -> list[Flow] | None:
    """Return all traffic of a step, or None if it is not planned.

    It is not planned for sequence parallelism, and where it is unknown how a model is split.
    """
    theory = theory_of(case.workload.model)
    if theory.num_parameters(case.layout, rank) is None or case.layout.sequence_parallel:
        return None
    if not theory.plans_traffic(case.layout):
        return None
    return [
        *data_parallel_traffic(case, rank),
        *tensor_parallel_traffic(case, rank),
        *pipeline_traffic(case, rank),
        *context_parallel_traffic(case, rank),
        *scalar_traffic(case, rank),
    ]


def reduced_each(
    case: Case, rank: int, reason: str = "gradients are reduced after every micro-batch"
) -> tuple[TrafficException, ...]:
    """Return the exception of a framework that reduces gradients after every micro-batch, not once a step.

    Returns nothing if a step has one micro-batch.
    """
    count = case.layout.num_micro_batches

    def each(flow: Flow) -> Flow:
        return replace(flow, num_bytes=count * flow.num_bytes, fewest=count, most=count * flow.most)

    return exceptions_for(step_traffic(case, rank) if count > 1 else None, Purpose.GRADIENTS, reason, each)
