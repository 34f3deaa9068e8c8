"""Where the time of profiled steps goes: computing, communicating in parallel or exposed, and idle.

On a GPU, the activities of its streams count: kernels and copies. On a CPU, PyTorch's operators and the backend's
events of collectives count. Gloo reports no point-to-point messages, so waiting for them counts as idle.
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
"""Start and stop in nanoseconds."""
MOST_KERNELS = 10
MOST_POINTS = 200
"""Most points of a curve, which is more than a plot's width can show."""


class ActivityKind(StrEnum):
    """Kind of activity of a processor."""

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
    """Spans of activities that it called. Its own time excludes them."""

    @property
    def span(self) -> Span:
        return self.start_ns, self.stop_ns


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All calls of one name within a step."""

    name: str
    kind: ActivityKind
    seconds: float
    """Mean seconds per step."""
    count: int
    """Calls in all profiled steps."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """All collectives of one kind over groups of one size."""

    kind: str
    group_size: int
    count: int
    num_bytes: int
    """Bytes of the full tensors."""
    seconds: float
    """Seconds from the call to its end, including waits for other ranks. Overlapping calls each count in full."""

    @property
    def bus_bytes_per_second(self) -> float:
        """Traffic of a link under ring algorithms, comparable with its datasheet (as in nccl-tests)."""
        return self.num_bytes * wire_factor(self.kind, self.group_size) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Mean of one rank's steps. Compute, exposed communication and idle time add up to the step."""

    num_steps: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    """Communication time, whether or not something was computed meanwhile."""
    exposed_seconds: float
    """Communication time during which nothing was computed."""
    idle_seconds: float
    kernels: list[Kernel] = field(default_factory=list)
    """The kernels that took longest, first."""
    bandwidths: list[Bandwidth] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the first step's start, and the allocator's bytes: the maximum of every stretch."""
    trace: str = ""
    """Trace file of the first rank next to the records, for Perfetto or chrome://tracing."""


def read_profile(
    activities: Sequence[Activity],
    steps: Sequence[Span],
    issued: Sequence[IssuedOperation] = (),
    memory: Sequence[tuple[int, int]] = (),
    trace: str = "",
) -> Profile:
    """Return the profile of what happened within `steps`.

    `issued` is the collectives with their durations, if known. `memory` is time and bytes of every change.
    """
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
    """Return the same time as disjoint spans in order."""
    found = list[Span]()
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def clip(spans: Iterable[Span], to: Span) -> Iterator[Span]:
    """Yield the parts of spans that lie within another span."""
    for start, stop in spans:
        if start < to[1] and stop > to[0]:
            yield max(start, to[0]), min(stop, to[1])


def length(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def curve(points: Sequence[tuple[int, int]], start_ns: int) -> list[tuple[float, int]]:
    """Return at most MOST_POINTS points: the one with most bytes in every stretch of time."""
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
