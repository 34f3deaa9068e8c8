"""Judges what ranks sent against theory and the exceptions from it that the adapter declares: to the byte.

A barrier carries no data, so no plan holds one. It is counted and told, and fails no case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshmark.measure.readings import Collective
from meshmark.records.record import Record, Verdict
from meshmark.text import pluralize
from meshmark.theory.flow import Flow, OneTimeTraffic, Route, by_route, departed
from meshmark.theory.traffic import METERED_STEP

BARRIER = "barrier"
_MEND = (
    "what the framework's algorithm is meant to send otherwise than theory says goes into `Adapter.traffic_exceptions`"
)
_MEND_STEP = "what the framework is meant to send in some steps alone goes into `Adapter.one_time_traffic`"


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


@dataclass(frozen=True, kw_only=True)
class Unlike:
    """Calls of one kind over one group that a rank's backend did in one step otherwise than in the metered one."""

    rank: int
    step: int
    route: Route
    sent: Collective | None
    metered: Collective | None

    @property
    def more_bytes(self) -> int:
        return (self.sent.num_bytes if self.sent else 0) - (self.metered.num_bytes if self.metered else 0)

    @property
    def more_calls(self) -> int:
        return (self.sent.count if self.sent else 0) - (self.metered.count if self.metered else 0)

    def is_declared(self, declared: Iterable[OneTimeTraffic]) -> bool:
        """Return whether nothing is missing and no more is sent than `declared`.

        What is declared of the metered step is missing in all others. Calls are not counted in the first step, because
        tensors may be put into other buckets once their order is known.
        """
        declared = [each for each in declared if each.kind == self.route[0]]
        own = [each for each in declared if self.step in each.steps]
        metered = [each for each in declared if METERED_STEP in each.steps]
        num_bytes = range(
            sum(each.least_bytes for each in own) - sum(each.most_bytes for each in metered),
            sum(each.most_bytes for each in own) - sum(each.least_bytes for each in metered) + 1,
        )
        calls = range(
            sum(each.least_calls for each in own) - sum(each.most_calls for each in metered),
            sum(each.most_calls for each in own) - sum(each.least_calls for each in metered) + 1,
        )
        return self.more_bytes in num_bytes and (self.step == 0 or self.more_calls in calls)

    def __str__(self) -> str:
        kind, ranks = self.route
        sent, usual = (
            f"{each.num_bytes:,} bytes in {_calls(each.count, each.count)}" if each else "none"
            for each in (self.sent, self.metered)
        )
        over = ", ".join(map(str, ranks))
        return (
            f"{kind} over ranks {over} on rank {self.rank} in step {self.step}: {sent}, in step {METERED_STEP} {usual}"
        )


def unlike_steps(record: Record) -> Iterator[Unlike]:
    """Yield traffic of other steps that is neither the same as in the metered step nor declared."""
    evidence = record.traffic
    for i, groups in enumerate(evidence.alike_steps):
        rank = record.ranks[i]
        usual = next((_routes(group.issued) for group in groups if METERED_STEP in group.steps), None)
        if usual is None:
            continue
        declared = evidence.one_time_traffic[i] if evidence.one_time_traffic else []
        once = {each.kind for each in declared if METERED_STEP in each.steps}  # other steps must lack it
        for group in groups:
            here = _routes(group.issued)
            for step in group.steps:
                if step == METERED_STEP or not _repeats(record, rank, step):
                    continue
                for route in sorted(usual.keys() | here.keys()):
                    each = Unlike(rank=rank, step=step, route=route, sent=here.get(route), metered=usual.get(route))
                    if (each.more_bytes or each.more_calls or route[0] in once) and not each.is_declared(declared):
                        yield each


def _repeats(record: Record, rank: int, step: int) -> bool:
    """Return whether the algorithm sends in `step` the same as in the metered step."""
    return record.case.workload.algorithm.traffic_repeats(record.case, rank, step)


def _routes(collectives: Iterable[Collective]) -> dict[Route, Collective]:
    return {(c.kind, c.ranks): c for c in collectives if c.kind != BARRIER}


def _calls(fewest: int, most: int) -> str:
    return f"{fewest:,} to {most:,} calls" if fewest != most else f"{most:,} call{'s' if most != 1 else ''}"


def judge_communication(record: Record) -> Verdict | None:
    """Every rank's calls by kind and group: the bytes of theory and declared exceptions exactly, in as many calls as
    these allow; None where theory does not plan it."""
    evidence = record.traffic
    if "communication" in record.unmeasured:
        return Verdict(suite="communication", passed=False, summary=record.unmeasured["communication"])
    unlike = sorted(unlike_steps(record), key=lambda each: (-abs(each.more_bytes), each.step))
    if not evidence.planned or None in evidence.planned:
        return _unlike_verdict(unlike, {}) if unlike else None
    expected = [
        by_route(departed(flows or (), declared))
        for flows, declared in zip(evidence.planned, evidence.traffic_exceptions, strict=True)
    ]
    found = [
        difference
        for i, (reading, routes) in enumerate(zip(evidence.readings, expected, strict=True))
        for difference in _differences(record.ranks[i], reading.asked, routes)
    ]
    worst = max(found, key=lambda d: (abs(d.measured_bytes - d.expected_bytes), d.expected is None), default=None)
    barriers = max((_barriers(reading.asked) for reading in evidence.readings), default=0)
    told: dict[str, float | int | str] = {
        "differences": len(found),
        "compared": sum(len(routes) for routes in expected),
        "declared": "; ".join(sorted({d.reason for declared in evidence.traffic_exceptions for d in declared})),
        "barriers": barriers,
    }
    told |= {
        "steps": len({step for groups in evidence.alike_steps for group in groups for step in group.steps}) or 1,
        "unlike_steps": len({each.step for each in unlike}),
        "smallest_message_bytes": 1,
        "smallest_setup_message_bytes": 1
        + max((d.most_bytes for own in evidence.one_time_traffic for d in own), default=0),
        "one_time": "; ".join(sorted({d.reason for declared in evidence.one_time_traffic for d in declared})),
    }
    also = f" (besides {pluralize(barriers, 'barrier')} a step, which no plan counts)" if barriers else ""
    if worst is None and unlike:
        return _unlike_verdict(unlike, told)
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


def _unlike_verdict(unlike: Sequence[Unlike], told: dict[str, float | int | str]) -> Verdict:
    """`unlike` begins with what decides: the most bytes."""
    worst = unlike[0]
    more = f", and {pluralize(len(unlike) - 1, 'more difference')}" if len(unlike) > 1 else ""
    evidence = told | {
        "kind": worst.route[0],
        "ranks": " ".join(map(str, worst.route[1])),
        "rank": worst.rank,
        "step": worst.step,
        "measured_bytes": worst.sent.num_bytes if worst.sent else 0,
        "planned_bytes": worst.metered.num_bytes if worst.metered else 0,
        "calls": worst.sent.count if worst.sent else 0,
    }
    return Verdict(suite="communication", passed=False, summary=f"{worst}{more}; {_MEND_STEP}", evidence=evidence)


def _barriers(asked: Sequence[Collective]) -> int:
    return sum(collective.count for collective in asked if collective.kind == BARRIER)


def _differences(rank: int, asked: list[Collective], expected: dict[Route, Flow]) -> Iterator[Difference]:
    measured = _routes(asked)
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
