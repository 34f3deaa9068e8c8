"""Closed forms of one rank's communication in one optimizer step: kind, ranks, calls and bytes.

Bytes are those of full tensors, as a framework requests them. `wire_factor` of `meshmark.measure.readings` converts
them to bytes sent under ring algorithms. The number of calls is fixed if the algorithm fixes it, and bounded where a
framework may split or join tensors.

A framework's exceptions from the plan are `TrafficException`s. `Sharding` has what FSDP's users choose beyond ZeRO
stage 3, with its memory and traffic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from meshmark.spec.case import Case
from meshmark.spec.layout import Axis, Layout, Recompute
from meshmark.spec.precision import LossScaling
from meshmark.theory.model_theory import theory_of
from meshmark.theory.partition import held_stage
from meshmark.theory.recipe import TrainingRecipe

# --- Planned traffic of one rank in one step, and a framework's exceptions from it.


class Purpose(StrEnum):
    """Content of the traffic."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    """Activations and their gradients: the residual stream between tensor-parallel regions, pipeline stages or parts
    of a sequence.
    """
    LOSS = "loss"
    """Scalars per token of a loss that is parallel in the vocabulary."""
    TIED_WEIGHT = "tied weight"
    """Gradient of a tied weight, between the two stages that hold it."""
    NORM = "norm"
    """Norm of the gradients, for clipping."""
    OVERFLOW = "overflow"
    """Whether some gradient overflowed, under loss scaling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Calls of one kind over one group of ranks."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast, reduce, send, recv, ..."""
    axes: str
    """Mesh axes along which the group's ranks differ: `dp`, or several joined by +."""
    ranks: tuple[int, ...]
    """The group, in order; or both ends of a send or a receive."""
    purpose: Purpose
    num_bytes: int
    """Bytes of the full tensors of all calls: the output of an all-gather, the input of a reduce-scatter."""
    fewest: int
    """Least number of calls. A framework may put tensors into buckets where theory does not define the buckets."""
    most: int
    """Largest number of calls. If tensors are bucketed, it is one per tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficException:
    """Traffic that a framework sends instead of, or in addition to, the planned traffic, and why."""

    sends: tuple[Flow, ...] = ()
    instead_of: tuple[Flow, ...] = ()
    """Planned flows that are not sent."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OneTimeTraffic:
    """Deviations from a framework's steady traffic in the steps during which it sets itself up.

    They are declared only by size, because the content may depend on versions, such as a pickled description of
    tensors.
    """

    kind: str
    """Kind of collective, as in `Flow`."""
    steps: tuple[int, ...]
    """Steps in which it is sent, counted from 0."""
    most_bytes: int
    """Upper bound on the bytes of all its calls in one step over one group."""
    most_calls: int
    least_bytes: int = 0
    """Lower bound on the bytes. Below zero if a step may send less over one group, such as what is still there
    initially.
    """
    least_calls: int = 0
    reason: str


def exceptions_for(
    flows: Iterable[Flow] | None, purpose: Purpose, reason: str, change: Callable[[Flow], Flow] | None = None
) -> tuple[TrafficException, ...]:
    """Return the exceptions for planned flows of `purpose` that a framework changes, or omits if `change` is None.

    Returns nothing if there are no such flows, as in a layout without the axis.
    """
    found = tuple(flow for flow in flows or () if flow.purpose is purpose)
    if not found:
        return ()
    return (TrafficException(sends=tuple(map(change, found)) if change else (), instead_of=found, reason=reason),)


def by(kind: str) -> Callable[[Flow], Flow]:
    """Return a change to another kind of collective with the same bytes."""
    return lambda flow: replace(flow, kind=kind)


def besides(
    flows: Iterable[Flow] | None, purpose: Purpose, share: Fraction, reason: str
) -> tuple[TrafficException, ...]:
    """Return an exception for additional bytes (padding) in the same calls as the planned flows of `purpose`.

    The bytes are a share of the flows'. Returns nothing if the share is zero.
    """
    more = tuple(
        replace(flow, num_bytes=int(flow.num_bytes * share), fewest=0, most=0)
        for flow in flows or ()
        if flow.purpose is purpose
    )
    return (TrafficException(sends=more, reason=reason),) if more and share else ()


def departed(flows: Sequence[Flow], traffic_exceptions: Iterable[TrafficException]) -> list[Flow]:
    """Return the flows that are sent when `traffic_exceptions` are applied to the planned `flows`.

    Raises `ValueError` when an exception replaces a flow that is not planned.
    """
    left = list(flows)
    for exception in traffic_exceptions:
        for flow in exception.instead_of:
            if flow not in left:
                ranks = ", ".join(map(str, flow.ranks))
                raise ValueError(f"replaces {flow.kind} of {flow.purpose} over ranks {ranks}, which theory lacks")
            left.remove(flow)
    return left + [flow for exception in traffic_exceptions for flow in exception.sends]


Route = tuple[str, tuple[int, ...]]
"""Kind and ranks, which are all that a meter can tell flows apart by."""


def by_route(flows: Iterable[Flow]) -> dict[Route, Flow]:
    """Merge flows of the same kind over the same ranks, whatever their purpose."""
    found: dict[Route, Flow] = {}
    for flow in flows:
        before = found.get((flow.kind, flow.ranks))
        found[flow.kind, flow.ranks] = (
            replace(
                flow,
                num_bytes=before.num_bytes + flow.num_bytes,
                fewest=before.fewest + flow.fewest,
                most=before.most + flow.most,
            )
            if before
            else flow
        )
    return found


def bytes_by_kind(flows: Iterable[Flow] | None) -> dict[str, int]:
    """Return the bytes by kind, over any ranks."""
    total: dict[str, int] = {}
    for flow in flows or ():
        total[flow.kind] = total.get(flow.kind, 0) + flow.num_bytes
    return total


def __getattr__(name: str) -> type:
    """Return a class by its name in an older version, with a `DeprecationWarning`."""
    if name != "Departure":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Departure is now called TrafficException", DeprecationWarning, stacklevel=2)
    return TrafficException


# --- Closed forms of one rank's communication in one optimizer step: kind, ranks, calls and bytes.

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


# --- Options of sharded data parallelism beyond ZeRO stage 3.


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How units (every block, and the root with all else) are sharded over data-parallel ranks."""

    reshards_blocks: bool = True
    """True if a block's weights are freed after its forward pass, and gathered again for its backward."""
    reshards_root: bool = True
    """True if the same applies to the root."""
    resharded_over: int | None = None
    """Number of neighbours that blocks' weights are resharded over. None means all shards."""
    replicas: int = 1
    """Groups of ranks that each hold all shards. Gradients are reduced within a group, then among groups (HSDP)."""
    reduces_within: bool = True
    """True if every micro-batch's gradients are reduced within a replica. Otherwise their sum is, once a step; until
    then every rank keeps gradients of whole weights.
    """
    reduces_among: bool = True
    """True if every micro-batch's gradients are also reduced among replicas. Otherwise their sum is, once a step."""

    @property
    def kept_share(self) -> float:
        """Share of a block's gathered weights kept from its forward pass to its backward."""
        return 1.0 if not self.reshards_blocks else 1.0 / self.resharded_over if self.resharded_over else 0.0

    def invalid_reason(self, layout: Layout) -> str | None:
        """Return why it does not fit `layout`, or None if it fits."""
        for name, number in (("replicas", self.replicas), ("neighbours to reshard over", self.resharded_over or 1)):
            if number > 1 and (layout.dp % number or layout.dp <= number):
                return f"{number} {name} take a larger multiple of {number} data-parallel ranks, got {layout.dp}"
        return None


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Elements that a framework adds as padding to what it shards."""

    root: int
    blocks: int
    reason: str


def sharded_recipe(recipe: TrainingRecipe, sharding: Sharding, num_micro_batches: int) -> TrainingRecipe:
    """Return `recipe` for a framework with this sharding.

    The peak is not planned if the reduction is delayed, because it is unknown how much of the whole gradients remains
    when the peak occurs.
    """
    puts_off = num_micro_batches > 1 and not sharding.reduces_within
    backward = replace(recipe.backward, keeps_root=not sharding.reshards_root, kept_share=sharding.kept_share)
    peak_known = recipe.peak_known and not puts_off
    return replace(recipe, backward=backward, replicas=sharding.replicas, peak_known=peak_known)


def offloaded_recipe(recipe: TrainingRecipe) -> TrainingRecipe:
    """Return `recipe` for a framework whose shards, including weights and gradients, are in host memory.

    They are the masters, from which a device gathers copies.
    """
    states = recipe.states
    kept = replace(states, weight_bytes=0.0, gradient_bytes=0.0, master_bytes=states.weight_bytes)
    return replace(recipe, states=kept)


def sharding_exceptions(case: Case, rank: int, sharding: Sharding, padding: Padding) -> tuple[TrafficException, ...]:
    """Return the exceptions from stage 3 in which everything is gathered twice per micro-batch from all ranks."""
    flows = [flow for flow in step_traffic(case, rank) or () if flow.purpose in _SENT]
    sent = [part for flow in flows for part in _SENT[flow.purpose](case, rank, flow, sharding, padding)]
    chosen = TrafficException(
        sends=tuple(part.flow for part in sent), instead_of=tuple(flows), reason="; ".join(_reasons(sharding))
    )
    padded = tuple(
        replace(part.flow, num_bytes=part.padding_bytes, fewest=0, most=0) for part in sent if part.padding_bytes
    )
    return (
        *([chosen] if chosen.sends != chosen.instead_of else []),
        *([TrafficException(sends=padded, reason=padding.reason)] if padded else []),
    )


@dataclass(frozen=True, kw_only=True)
class _Sent:
    flow: Flow
    padding_bytes: int


def _weights(case: Case, rank: int, flow: Flow, sharding: Sharding, padding: Padding) -> list[_Sent]:
    """Return the gathers of weights. Theory plans two of every element; the second may come only from neighbours."""
    model = case.workload.model
    element = flow.num_bytes // (2 * model.num_parameters)
    root = model.embedding_parameters + model.head_parameters
    blocks = model.num_parameters - root
    times, shards = 1 + sharding.reshards_root, neighbours(flow, sharding.replicas, rank)

    def gathered(ranks: tuple[int, ...], root_times: int, block_times: int) -> _Sent:
        num_bytes = element * (root_times * root + block_times * blocks)
        more = element * (root_times * padding.root + block_times * padding.blocks)
        fewest = flow.fewest // 2 * max(root_times * (root > 0), block_times * (blocks > 0))
        return _Sent(flow=replace(flow, ranks=ranks, num_bytes=num_bytes, fewest=fewest), padding_bytes=more)

    if sharding.resharded_over is None:
        return [gathered(shards, times, 1 + sharding.reshards_blocks)]
    near = neighbours(flow, case.layout.dp // sharding.resharded_over, rank)
    return [gathered(shards, times, 1), gathered(near, 0, 1)]


def _gradients(case: Case, rank: int, flow: Flow, sharding: Sharding, padding: Padding) -> list[_Sent]:
    """Return the reductions within a replica, and then of a rank's shard among the ranks that also hold it."""
    whole = case.workload.model.num_parameters
    more = flow.num_bytes * (padding.root + padding.blocks) // whole
    shards, among = neighbours(flow, sharding.replicas, rank), across(flow, sharding.replicas, rank)
    within = case.layout.num_micro_batches if not sharding.reduces_within else 1
    sent = [_Sent(flow=_fewer(replace(flow, ranks=shards), within), padding_bytes=more // within)]
    if sharding.replicas > 1:
        own = flow.num_bytes // len(shards)  # what is over to a whole byte is padding's, which makes shards equal
        shard = replace(flow, kind="all_reduce", ranks=among, num_bytes=own)
        times = within if sharding.reduces_among else case.layout.num_micro_batches
        padding_bytes = ((flow.num_bytes + more) // len(shards) - own) // times
        sent.append(_Sent(flow=_fewer(shard, times), padding_bytes=padding_bytes))
    return sent


def _fewer(flow: Flow, times: int) -> Flow:
    """Return a flow that is sent once in place of `times`."""
    return replace(flow, num_bytes=flow.num_bytes // times, fewest=flow.fewest // times)


_SENT = {Purpose.WEIGHTS: _weights, Purpose.GRADIENTS: _gradients}


def neighbours(flow: Flow, groups: int, rank: int) -> tuple[int, ...]:
    """Return the group of `rank` if the flow's ranks are divided into `groups` of neighbours."""
    size = len(flow.ranks) // groups
    start = flow.ranks.index(rank) // size * size
    return flow.ranks[start : start + size]


def across(flow: Flow, groups: int, rank: int) -> tuple[int, ...]:
    """Return the ranks with the same position as `rank` in each such group."""
    size = len(flow.ranks) // groups
    return flow.ranks[flow.ranks.index(rank) % size :: size]


def _reasons(sharding: Sharding) -> list[str]:
    found = {
        "what is in no block stays whole from forward to backward": not sharding.reshards_root,
        "blocks stay whole from forward to backward": not sharding.reshards_blocks,
        f"blocks are gathered again from {sharding.resharded_over} neighbours": bool(sharding.resharded_over),
        f"{sharding.replicas} replicas, each sharded": sharding.replicas > 1,
        "gradients are reduced once a step": not sharding.reduces_within,
        "gradients are reduced among replicas once a step": sharding.replicas > 1 and not sharding.reduces_among,
    }
    return [reason for reason, holds in found.items() if holds]
