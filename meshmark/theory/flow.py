"""What one rank is to send in one step, and where a framework departs from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction


class Purpose(StrEnum):
    """What is sent."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    """And their gradients: the residual stream between tensor-parallel regions, pipeline stages or parts of a
    sequence."""
    LOSS = "loss"
    """Scalars a token of a loss that is parallel in the vocabulary."""
    TIED_WEIGHT = "tied weight"
    """Its gradient, between the two stages that hold it."""
    NORM = "norm"
    """Of the gradients, to clip by."""
    OVERFLOW = "overflow"
    """Whether some gradient did, under loss scaling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Calls of one kind over one group of ranks."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast, reduce, send, recv, ..."""
    axes: str
    """Of the mesh, along which the group's ranks differ: `dp`, or several joined by +."""
    ranks: tuple[int, ...]
    """The group, in order; both ends of a send or a receive."""
    purpose: Purpose
    num_bytes: int
    """Of the full tensors of all calls: what an all-gather yields, what a reduce-scatter takes."""
    fewest: int
    """Calls at least. A framework may put tensors into buckets where theory does not say how they are cut."""
    most: int
    """Calls at most: where tensors are bucketed, one a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficException:
    """What a framework really sends in the place of what theory says, or besides, and why."""

    sends: tuple[Flow, ...] = ()
    instead_of: tuple[Flow, ...] = ()
    """Of theory's flows, those that are not sent."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OneTimeTraffic:
    """What a framework sends besides what it sends in every step, or does without, while it sets itself up.

    It is told by size alone: what it holds may depend on versions, such as a pickled description of tensors.
    """

    kind: str
    """As of a `Flow`."""
    steps: tuple[int, ...]
    """In which it is sent, counted from 0."""
    most_bytes: int
    """Of all its calls in one step over one group."""
    most_calls: int
    least_bytes: int = 0
    """Below zero where a step may send so much less over one group, such as what is still there from the start."""
    least_calls: int = 0
    reason: str


def exceptions_for(
    flows: Iterable[Flow] | None, purpose: Purpose, reason: str, change: Callable[[Flow], Flow] | None = None
) -> tuple[TrafficException, ...]:
    """From the flows of `purpose`, which a framework sends changed, or (None) not at all. Nothing where there are none:
    a layout without the axis."""
    found = tuple(flow for flow in flows or () if flow.purpose is purpose)
    if not found:
        return ()
    return (TrafficException(sends=tuple(map(change, found)) if change else (), instead_of=found, reason=reason),)


def by(kind: str) -> Callable[[Flow], Flow]:
    """A change: the same bytes, by another kind of collective."""
    return lambda flow: replace(flow, kind=kind)


def besides(
    flows: Iterable[Flow] | None, purpose: Purpose, share: Fraction, reason: str
) -> tuple[TrafficException, ...]:
    """So much more in the same calls as theory's flows of `purpose`, as a share of them: padding. Nothing where it is
    nothing."""
    more = tuple(
        replace(flow, num_bytes=int(flow.num_bytes * share), fewest=0, most=0)
        for flow in flows or ()
        if flow.purpose is purpose
    )
    return (TrafficException(sends=more, reason=reason),) if more and share else ()


def departed(flows: Sequence[Flow], traffic_exceptions: Iterable[TrafficException]) -> list[Flow]:
    """What is sent when theory's `flows` are departed from so.

    Raises `ValueError` when something is declared in the place of what theory does not say."""
    left = list(flows)
    for exception in traffic_exceptions:
        for flow in exception.instead_of:
            if flow not in left:
                ranks = ", ".join(map(str, flow.ranks))
                raise ValueError(f"departs from {flow.kind} of {flow.purpose} over ranks {ranks}: none of theory's")
            left.remove(flow)
    return left + [flow for exception in traffic_exceptions for flow in exception.sends]


Route = tuple[str, tuple[int, ...]]
"""Kind and ranks: what a meter can tell one flow from another by."""


def by_route(flows: Iterable[Flow]) -> dict[Route, Flow]:
    """Flows of the same kind over the same ranks, whatever for, as one."""
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
    """Over whatever ranks."""
    total: dict[str, int] = {}
    for flow in flows or ():
        total[flow.kind] = total.get(flow.kind, 0) + flow.num_bytes
    return total


def __getattr__(name: str) -> type:
    """Return a class by its name of an older version, with a `DeprecationWarning`."""
    if name != "Departure":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Departure is now called TrafficException", DeprecationWarning, stacklevel=2)
    return TrafficException
