"""Planned traffic of one rank in one step, and a framework's exceptions from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction


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
                raise ValueError(f"departs from {flow.kind} of {flow.purpose} over ranks {ranks}: none of theory's")
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
