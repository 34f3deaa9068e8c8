"""Compare bytes held and collectives sent. They are exact, so any difference is a change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from meshmark.measure.readings import Bytes, Collective, MemoryReading
from meshmark.records.record import Record, Status
from meshmark.regression.change import Change, ChangeOutcome, Effect, Kind
from meshmark.regression.runs import CaseRuns
from meshmark.text import pluralize

CATEGORIES = tuple(each.name for each in dataclasses.fields(Bytes))
INSTANTS = {
    "steady": "memory after a step",
    "states": "model states",
    "peak": "peak memory",
    "held": "memory before the backward pass",
}
"""Instants of a `MemoryReading`, with their names in rows."""
_LINGERING = {"communication"}
"""Categories that a backend's thread may hold a moment longer at instants other than the peak.

Records give the amount only for the peak.
"""
_LATE = "which a backend's thread may have held a moment longer; run it again"
_MOST_NAMED = 4
"""Number of differences that a row lists."""


def exact_changes(name: str, before: CaseRuns, after: CaseRuns) -> Iterator[Change]:
    """Compare memory by category and traffic by collective, in the last complete instrumented pass of each side."""
    one, other = (_complete(runs) for runs in (before, after))
    if one is None or other is None:
        return
    ours, theirs = one.memory.readings, other.memory.readings
    if ours and len(ours) == len(theirs):
        for instant in INSTANTS:
            yield from _memory(name, instant, ours, theirs)
        if any(reading.workspace_bytes for reading in (*ours, *theirs)):
            pairs = [(a.counted_peak_bytes, b.counted_peak_bytes) for a, b in zip(ours, theirs, strict=True)]
            yield _row(name, f"{INSTANTS['peak']} with workspaces of kernels", pairs, "")
    elif ours and not theirs:
        yield _unread(name, INSTANTS["peak"])
    if one.traffic.readings and len(one.traffic.readings) == len(other.traffic.readings):
        sent = list(zip(one.traffic.readings, other.traffic.readings, strict=True))
        yield _traffic(name, "traffic asked for", [(a.asked, b.asked) for a, b in sent])
        yield _traffic(name, "traffic issued", [(a.issued, b.issued) for a, b in sent])
    elif one.traffic.readings and not other.traffic.readings:
        yield _unread(name, "traffic issued")


def _unread(name: str, metric: str) -> Change:
    """Return a row for bytes that A has read and B has not: nobody knows whether they grew."""
    told = "B has not read it; run it with the steps and options of A"
    return Change(
        case=name,
        metric=metric,
        kind=Kind.BIGGER,
        outcome=ChangeOutcome.UNDECIDED,
        before="read",
        after="not read",
        evidence=told,
    )


def _complete(runs: CaseRuns) -> Record | None:
    return next((r for r in reversed(runs.observed) if r.outcome.status is Status.OK), None)


def _memory(
    name: str, instant: str, before: Sequence[MemoryReading], after: Sequence[MemoryReading]
) -> Iterator[Change]:
    """Compare the total of one instant by rank, with a row for it and one for each category that changed."""
    ours, theirs = ([getattr(reading, instant) for reading in side] for side in (before, after))
    if None in ours or None in theirs:
        return
    late = [max(a.late_bytes, b.late_bytes) if instant == "peak" else 0 for a, b in zip(before, after, strict=True)]
    moved = {
        category: [
            (rank, getattr(a, category), getattr(b, category))
            for rank, (a, b) in enumerate(zip(ours, theirs, strict=True))
        ]
        for category in CATEGORIES
    }
    moved = {category: [e for e in each if e[1] != e[2]] for category, each in moved.items()}
    named = [f"{category} on rank {rank}: {a:,} -> {b:,}" for category, each in moved.items() for rank, a, b in each]
    totals = [(a.total, b.total) for a, b in zip(ours, theirs, strict=True)]
    late_only = bool(named) and any(late) and all(abs(b - a) <= n for (a, b), n in zip(totals, late, strict=True))
    lingering = instant != "peak" and moved.keys() - _LINGERING == {c for c in moved if not moved[c]} - _LINGERING
    hint = _LATE if late_only or (named and lingering) else ""
    row = _row(name, INSTANTS[instant], totals, "; ".join(filter(None, [_some(named), hint])))
    row = dataclasses.replace(row, moved=tuple(category for category, each in moved.items() if each))
    if late_only:
        row = dataclasses.replace(row, outcome=ChangeOutcome.SAME, by=0.0)
    elif named and (
        lingering or row.outcome is ChangeOutcome.SAME
    ):  # in the second case as many bytes, for other things
        row = dataclasses.replace(row, outcome=ChangeOutcome.UNDECIDED)
    yield row
    for category, each in moved.items():
        if each and not hint:
            pairs = [(getattr(a, category), getattr(b, category)) for a, b in zip(ours, theirs, strict=True)]
            part = _row(name, f"{INSTANTS[instant]}, {category.replace('_', ' ')}", pairs, _ranks_of(each))
            yield dataclasses.replace(part, gated=False)


def _ranks_of(each: Sequence[tuple[int, int, int]]) -> str:
    return _some([f"rank {rank}: {a:,} -> {b:,}" for rank, a, b in each])


def _some(named: Sequence[str]) -> str:
    more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return "; ".join(named[:_MOST_NAMED]) + more


def _row(name: str, metric: str, pairs: Sequence[tuple[int, int]], evidence: str) -> Change:
    """Return a row for bytes by rank.

    It is worse if any rank has more, because the fullest rank decides what fits. The rank that grew most is shown.
    """
    worst = max(range(len(pairs)), key=lambda rank: (pairs[rank][1] - pairs[rank][0], pairs[rank][1]))
    if all(b <= a for a, b in pairs):
        worst = min(range(len(pairs)), key=lambda rank: pairs[rank][1] - pairs[rank][0])
    before, after = pairs[worst]
    share = (after - before) / before if before else math.inf if after else 0.0
    outcome = ChangeOutcome.SAME if before == after else ChangeOutcome.WORSE if after > before else ChangeOutcome.BETTER
    exact = Effect(estimate=share, lowest=share, highest=share) if math.isfinite(share) and share else None
    return Change(
        case=name,
        metric=metric,
        kind=Kind.BIGGER,
        outcome=outcome,
        before=f"{before:,} bytes",
        after=f"{after:,} bytes",
        effect=exact,
        by=max(share, 0.0),
        evidence=evidence,
    )


def _traffic(name: str, metric: str, ranks: Sequence[tuple[Sequence[Collective], Sequence[Collective]]]) -> Change:
    """Compare traffic by rank, kind and group. Bytes decide; for equal bytes, more calls are worse."""
    named, routes, calls = list[str](), dict[str, None](), 0
    for rank, (ours, theirs) in enumerate(ranks):
        one, other = (_routes(side, by_size=not all(c.ranks for c in (*ours, *theirs))) for side in (ours, theirs))
        for route in sorted(one.keys() | other.keys()):
            a, b = one.get(route, (0, 0)), other.get(route, (0, 0))
            if a != b:
                calls += b[1] - a[1]
                routes[route] = None
                named.append(f"{route} on rank {rank}: {_amount(*a)} -> {_amount(*b)}")
    pairs = [(sum(c.num_bytes for c in ours), sum(c.num_bytes for c in theirs)) for ours, theirs in ranks]
    row = dataclasses.replace(_row(name, metric, pairs, _some(named)), moved=tuple(routes))
    if named and row.outcome is ChangeOutcome.SAME:
        turned = ChangeOutcome.WORSE if calls > 0 else ChangeOutcome.BETTER if calls < 0 else ChangeOutcome.UNDECIDED
        return dataclasses.replace(row, outcome=turned)
    return row


def _routes(side: Sequence[Collective], *, by_size: bool) -> dict[str, tuple[int, int]]:
    """Return bytes and calls by kind and group. `by_size`: one side lacks its groups, as in old records."""
    found: dict[str, tuple[int, int]] = {}
    for each in side:
        over = pluralize(each.group_size, "rank") if by_size else f"ranks {', '.join(map(str, each.ranks))}"
        num_bytes, calls = found.get(f"{each.kind} over {over}", (0, 0))
        found[f"{each.kind} over {over}"] = num_bytes + each.num_bytes, calls + each.count
    return found


def _amount(num_bytes: int, calls: int) -> str:
    return f"{num_bytes:,} bytes in {calls:,} call{'s' if calls != 1 else ''}" if calls else "none"
