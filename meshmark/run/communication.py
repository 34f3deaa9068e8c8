"""Judges what ranks sent against theory and the exceptions from it that the adapter declares: to the byte.

A barrier carries no data, so no plan holds one. It is counted and told, and fails no case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshmark.measure.readings import Collective
from meshmark.pluralize import pluralize
from meshmark.run.record import Record, Verdict
from meshmark.theory.flow import Flow, Route, by_route, departed

BARRIER = "barrier"
_MEND = (
    "what the framework's algorithm is meant to send otherwise than theory says goes into `Adapter.traffic_exceptions`"
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Calls of one kind over one group that are not what was expected of a rank."""

    rank: int
    route: Route
    measured: Collective | None
    expected: Flow | None

    @property
    def measured_bytes(self) -> int:
        return self.measured.num_bytes if self.measured else 0

    @property
    def expected_bytes(self) -> int:
        return self.expected.num_bytes if self.expected else 0

    @property
    def calls(self) -> int:
        return self.measured.count if self.measured else 0

    def __str__(self) -> str:
        kind, ranks = self.route
        over = ", ".join(map(str, ranks))
        found = f"{self.measured_bytes:,} bytes in {_calls(self.calls, self.calls)}" if self.measured else "none"
        wanted = "none"
        if self.expected:
            wanted = f"{self.expected_bytes:,} in {_calls(self.expected.fewest, self.expected.most)}"
        return f"{kind} over ranks {over} on rank {self.rank}: {found}, expected {wanted}"


def _calls(fewest: int, most: int) -> str:
    return f"{fewest:,} to {most:,} calls" if fewest != most else f"{most:,} call{'s' if most != 1 else ''}"


def judge_communication(record: Record) -> Verdict | None:
    """Every rank's calls by kind and group: the bytes of theory and declared exceptions exactly, in as many calls as
    these allow; None where theory does not plan it."""
    evidence = record.traffic
    if "communication" in record.unmeasured:
        return Verdict(suite="communication", passed=False, summary=record.unmeasured["communication"])
    if not evidence.planned or None in evidence.planned:
        return None
    expected = [
        by_route(departed(flows or (), declared))
        for flows, declared in zip(evidence.planned, evidence.traffic_exceptions, strict=True)
    ]
    found = [
        difference
        for rank, (reading, routes) in enumerate(zip(evidence.readings, expected, strict=True))
        for difference in _differences(rank, reading.asked, routes)
    ]
    worst = max(found, key=lambda d: (abs(d.measured_bytes - d.expected_bytes), d.expected is None), default=None)
    barriers = max((_barriers(reading.asked) for reading in evidence.readings), default=0)
    told: dict[str, float | int | str] = {
        "differences": len(found),
        "compared": sum(len(routes) for routes in expected),
        "declared": "; ".join(sorted({d.reason for declared in evidence.traffic_exceptions for d in declared})),
        "barriers": barriers,
    }
    also = f" (besides {pluralize(barriers, 'barrier')} a step, which no plan counts)" if barriers else ""
    if worst is None:
        return Verdict(suite="communication", passed=True, summary=_as_planned(expected) + also, evidence=told)
    told |= {
        "kind": worst.route[0],
        "ranks": " ".join(map(str, worst.route[1])),
        "rank": worst.rank,
        "measured_bytes": worst.measured_bytes,
        "planned_bytes": worst.expected_bytes,
        "calls": worst.calls,
    }
    more = f", and {pluralize(len(found) - 1, 'more difference')}" if len(found) > 1 else ""
    return Verdict(suite="communication", passed=False, summary=f"{worst}{more}{also}; {_MEND}", evidence=told)


def _barriers(asked: Sequence[Collective]) -> int:
    return sum(collective.count for collective in asked if collective.kind == BARRIER)


def _differences(rank: int, asked: list[Collective], expected: dict[Route, Flow]) -> Iterator[Difference]:
    measured = {(c.kind, c.ranks): c for c in asked if c.kind != BARRIER}
    for route in sorted(measured.keys() | expected.keys()):
        difference = Difference(rank=rank, route=route, measured=measured.get(route), expected=expected.get(route))
        wanted = difference.expected
        fewest, most = (wanted.fewest, wanted.most) if wanted else (0, 0)
        if difference.measured_bytes != difference.expected_bytes or not fewest <= difference.calls <= most:
            yield difference


def _as_planned(expected: list[dict[Route, Flow]]) -> str:
    """The largest flow of all ranks, and how many there are."""
    flows = [flow for routes in expected for flow in routes.values()]
    if not flows:
        return "nothing to communicate"
    largest = max(flows, key=lambda flow: flow.num_bytes)
    calls = _calls(largest.fewest, largest.most)
    told = f"the largest {largest.num_bytes:,} bytes of {largest.kind} in {calls}"
    return f"{pluralize(len(flows), 'flow')} to the byte, {told}"
