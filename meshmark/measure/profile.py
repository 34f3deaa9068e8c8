"""Where the time of profiled steps went: computing, communicating beside it or alone, and neither.

On a GPU what counts is what its streams did: kernels, copies. On a CPU it is PyTorch's operators and the backend's own
events of collectives; gloo tells of no messages between two ranks, so that waiting for
them is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from meshmark.measure.readings import wire_factor

if TYPE_CHECKING:
    from meshmark.measure.flight_recorder import IssuedOperation  # which loads torch; a record is read without it

Span = tuple[int, int]
"""Start and stop, nanoseconds."""
MOST_KERNELS = 10
MOST_POINTS = 200
"""Of a curve: more than a picture's width can show."""


class ActivityKind(StrEnum):
    """What a processor does."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True)
class Activity:
    """One kernel, operator or collective."""

    name: str
    kind: ActivityKind
    start_ns: int
    stop_ns: int
    called: tuple[Span, ...] = ()
    """When activities ran that it called itself: what it takes is without them."""

    @property
    def span(self) -> Span:
        return self.start_ns, self.stop_ns


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All calls of one name within a step."""

    name: str
    kind: ActivityKind
    seconds: float
    """Of a step, in the mean."""
    count: int
    """Of all profiled steps."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """All collectives of one kind over groups of one size."""

    kind: str
    group_size: int
    count: int
    num_bytes: int
    """Of the full tensors."""
    seconds: float
    """From the call to its end, waiting for the other ranks among it; calls that overlap each count in full."""

    @property
    def bus_bytes_per_second(self) -> float:
        """What a link carries under ring algorithms: comparable with its datasheet (nccl-tests)."""
        return self.num_bytes * wire_factor(self.kind, self.group_size) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One rank's steps, in the mean. Compute, exposed communication and idle time add up to the step."""

    num_steps: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    """Whether or not anything was computed meanwhile."""
    exposed_seconds: float
    """Of it, while nothing was computed."""
    idle_seconds: float
    kernels: list[Kernel] = field(default_factory=list)
    """Those that took longest, first."""
    bandwidths: list[Bandwidth] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the first step's start, and bytes that the allocator counted: the most of every stretch."""
    trace: str = ""
    """Of the first rank: a file beside the records, for Perfetto or chrome://tracing."""


def read_profile(
    activities: Sequence[Activity],
    steps: Sequence[Span],
    issued: Sequence[IssuedOperation] = (),
    memory: Sequence[tuple[int, int]] = (),
    trace: str = "",
) -> Profile:
    """Of what happened within `steps`. `issued`: collectives with their seconds, where these are known; `memory`: time
    and bytes of every change."""
    spans = {kind: union(a.span for a in activities if a.kind is kind) for kind in ActivityKind}
    computing, communicating = spans[ActivityKind.COMPUTE], spans[ActivityKind.COMMUNICATION]
    busy = union([*computing, *communicating])
    wall, computed, communicated, together = (
        sum(length(clip(spans_, step)) for step in steps) for spans_ in (steps, computing, communicating, busy)
    )
    seconds = 1e9 * len(steps)  # nanoseconds of all steps to seconds of one
    return Profile(
        num_steps=len(steps),
        step_seconds=wall / seconds,
        compute_seconds=computed / seconds,
        communication_seconds=communicated / seconds,
        exposed_seconds=(together - computed) / seconds,
        idle_seconds=(wall - together) / seconds,
        kernels=_kernels(activities, steps),
        bandwidths=_bandwidths(issued, steps),
        memory=curve([(t, b) for t, b in memory if steps[0][0] <= t < steps[-1][1]], steps[0][0]),
        trace=trace,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not meet, in order."""
    found = list[Span]()
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def clip(spans: Iterable[Span], to: Span) -> Iterator[Span]:
    """What of them lies within another."""
    for start, stop in spans:
        if start < to[1] and stop > to[0]:
            yield max(start, to[0]), min(stop, to[1])


def length(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def curve(points: Sequence[tuple[int, int]], start_ns: int) -> list[tuple[float, int]]:
    """At most MOST_POINTS of them, of every stretch of time the one with most bytes."""
    if not points:
        return []
    stretch = max((points[-1][0] - start_ns) // MOST_POINTS + 1, 1)
    most = dict[int, tuple[int, int]]()
    for time_ns, num_bytes in points:
        place = (time_ns - start_ns) // stretch
        if place not in most or num_bytes > most[place][1]:
            most[place] = time_ns, num_bytes
    return [(round((time_ns - start_ns) / 1e9, 7), num_bytes) for time_ns, num_bytes in most.values()]


def _kernels(activities: Sequence[Activity], steps: Sequence[Span]) -> list[Kernel]:
    totals = dict[tuple[str, ActivityKind], tuple[int, int]]()
    for activity in activities:
        within = sum(length(clip([activity.span], step)) - length(clip(activity.called, step)) for step in steps)
        if within:
            spent, count = totals.get((activity.name, activity.kind), (0, 0))
            totals[activity.name, activity.kind] = spent + within, count + 1
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:MOST_KERNELS]
    return [
        Kernel(name=name, kind=kind, seconds=spent / len(steps) / 1e9, count=count)
        for (name, kind), (spent, count) in longest
    ]


def _bandwidths(issued: Sequence[IssuedOperation], steps: Sequence[Span]) -> list[Bandwidth]:
    totals = dict[tuple[str, int], tuple[int, int, float]]()
    for one in issued:
        inside = any(start <= one.time_ns < stop for start, stop in steps)
        if inside and one.seconds and len(one.ranks) > 1 and one.kind != "barrier":
            count, num_bytes, seconds = totals.get((one.kind, len(one.ranks)), (0, 0, 0.0))
            totals[one.kind, len(one.ranks)] = count + 1, num_bytes + one.num_bytes, seconds + one.seconds
    return [
        Bandwidth(kind=kind, group_size=size, count=count, num_bytes=num_bytes, seconds=seconds)
        for (kind, size), (count, num_bytes, seconds) in sorted(totals.items())
    ]
