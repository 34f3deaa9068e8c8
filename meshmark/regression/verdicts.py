"""Compare verdicts, ends of passes and clauses of two sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshmark.records.record import Record, Status, Verdict, decisive
from meshmark.regression.change import Change, ChangeOutcome, Kind
from meshmark.regression.runs import CaseRuns
from meshmark.text import pluralize, some_of

ENDINGS = ("instrumented pass", "timed pass")
"""Metrics that say how a pass ended."""
SUITES = ("equivalence", "memory", "communication", "throughput")


def verdict_changes(name: str, before: CaseRuns, after: CaseRuns) -> Iterator[Change]:
    """Compare how passes ended and, for those that completed, each suite's verdict."""
    passes = (before.observed, after.observed), (before.timed, after.timed)
    for what, (one, other) in zip(ENDINGS, passes, strict=True):
        if one and other:
            yield _ending(name, what, one[-1], other[-1])
    for suite in SUITES:
        one_verdict, other_verdict = (_verdict(runs, suite) for runs in (before, after))
        if one_verdict or other_verdict:
            change = _verdicts(name, suite, one_verdict, other_verdict)
            fewer = "" if suite == "throughput" else _fewer_steps(before, after)
            is_right = other_verdict is not None and other_verdict.passed and not other_verdict.undecided
            if fewer and is_right:  # what was wrong in a step that was not judged is not known
                change = replace(change, outcome=ChangeOutcome.UNDECIDED, evidence=fewer)
            yield change


def _fewer_steps(before: CaseRuns, after: CaseRuns) -> str:
    """Return that B was judged in fewer steps than A, in words. Empty if it was not."""
    if not (before.observed and after.observed):
        return ""
    one, other = decisive(before.observed).steps, decisive(after.observed).steps
    return f"judged in {pluralize(other, 'step')}, and in {one} in A: give both the same --steps" * (other < one)


def _verdict(runs: CaseRuns, suite: str) -> Verdict | None:
    records = runs.timed if suite == "throughput" else runs.observed
    return decisive(records, suite).verdict(suite) if records else None


def _ending(name: str, what: str, before: Record, after: Record) -> Change:
    one, other = before.outcome, after.outcome
    outcome = _ranked(_end_rank(one.status), _end_rank(other.status))
    if outcome is ChangeOutcome.SAME and _says_nothing(one.status):
        outcome = ChangeOutcome.UNDECIDED
    return Change(
        case=name,
        metric=what,
        kind=Kind.WRONG,
        outcome=outcome,
        before=str(one.status),
        after=str(other.status),
        evidence="" if one.status is other.status else (other.message or one.message),
    )


def _end_rank(status: Status) -> int | None:
    """Return a rank for comparing ends, or None if the status says nothing about the code."""
    if status is Status.SKIPPED or _says_nothing(status):
        return None
    return int(status is Status.OK)


def _says_nothing(status: Status) -> bool:
    """Return whether a case was begun and did not get as far as an answer, for a reason that is not the adapter's."""
    return status is Status.SLOW or status.outside


def _verdicts(name: str, suite: str, one: Verdict | None, other: Verdict | None) -> Change:
    before, after = _words(one), _words(other)
    outcome = ChangeOutcome.SAME if before == after else _ranked(_rank(one), _rank(other))
    evidence = ""
    if before != after and other:
        evidence = str(other.evidence.get("diagnosis", "")) or other.summary
    return Change(
        case=name,
        metric=f"{suite} verdict",
        kind=Kind.WRONG,
        outcome=outcome,
        before=before,
        after=after,
        evidence=evidence,
    )


def _words(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not judged"
    return "cannot tell" if verdict.undecided else "yes" if verdict.passed else "no"


def _rank(verdict: Verdict | None) -> int | None:
    return None if verdict is None or verdict.undecided else int(verdict.passed)


def _ranked(one: int | None, other: int | None) -> ChangeOutcome:
    if one is None or other is None:
        return ChangeOutcome.SAME if one is other else ChangeOutcome.UNDECIDED
    return ChangeOutcome.SAME if one == other else ChangeOutcome.WORSE if other < one else ChangeOutcome.BETTER


def clause_changes(before: Iterable[Record], after: Iterable[Record]) -> Iterator[Change]:
    """Compare every clause that both sides have checked for one adapter in one layout, and tell which ones were
    answered in A alone.
    """
    ours, theirs = ([r for r in records if r.conformance.scenario] for records in (before, after))
    if not ours:
        return
    from meshmark.conformance.finding import ClauseResult
    from meshmark.report.conformance import columns  # which import torch

    ranks = {ClauseResult.FAIL: 0, ClauseResult.KNOWN_GAP: 1, ClauseResult.PASS: 2, ClauseResult.STALE_GAP: 2}
    others = {column.base.id: column for column in columns(theirs)}
    for column in columns(ours):
        found = others[column.base.id].findings if column.base.id in others else {}
        name = f"{column.base.adapter}-{column.base.layout.id}"
        answered = [clause for clause, one in column.findings.items() if one.result in ranks]
        if gone := [clause for clause in answered if clause not in found or found[clause].result not in ranks]:
            yield Change(
                case=name,
                metric="clauses",
                kind=Kind.MISSING,
                outcome=ChangeOutcome.WORSE,
                before=f"{len(answered)} checked",
                after=f"{len(answered) - len(gone)} of them",
                evidence=f"checked in A alone: {some_of(gone)}",
            )
        for clause, one in column.findings.items():
            if clause not in found:
                continue
            other = found[clause]
            same = one.result is other.result
            yield Change(
                case=name,
                metric=f"clause {clause}",
                kind=Kind.WRONG,
                outcome=ChangeOutcome.SAME if same else _ranked(ranks.get(one.result), ranks.get(other.result)),
                before=str(one.result),
                after=str(other.result),
                evidence="" if same else other.evidence,
            )
