"""Assertion helpers of the suites."""

from __future__ import annotations

import warnings

import pytest

from meshmark.conformance.clauses import Clause
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.judge.sample import unsampled
from meshmark.records.record import Record, Status, Verdict
from meshmark.records.request import Task
from meshmark.regression.baseline_gate import BaselineGate
from meshmark.report.failure_text import of_changes, of_outcome, of_verdict, row
from meshmark.spec.case import Case


def expect_ran(record: Record) -> None:
    """Skip the test if the pass was skipped, and fail with the evidence if it did not end."""
    __tracebackhide__ = True
    outcome = record.outcome
    if outcome.status is Status.SKIPPED:
        pytest.skip(outcome.message)
    if outcome.status is not Status.OK:
        pytest.fail(of_outcome(record), pytrace=False)


def expect(record: Record, suite: str, baseline: BaselineGate | None = None) -> None:
    """Fail unless the verdict of `suite` exists and passed, and its metrics are not worse than in `baseline`."""
    __tracebackhide__ = True
    expect_ran(record)
    verdict = record.verdict(suite)
    if verdict is None:
        expect_no_worse(record, suite, baseline)
        unasked = unsampled(record.case) or "--assess off"
        pytest.skip(f"not judged: {unasked}" if suite == "equivalence" else f"{suite}: not planned")
    expect_no_gap(record, verdict)
    if not verdict.passed:
        pytest.fail(of_verdict(record, verdict), pytrace=False)
    expect_no_worse(record, suite, baseline)


def expect_no_gap(record: Record, verdict: Verdict) -> None:
    """Turn a failure that the user declared into an expected failure, and warn if it no longer shows."""
    __tracebackhide__ = True
    for gap in record.conformance.known_gaps:
        if not gap.covers(record.case, verdict.suite):
            continue
        told = f"{record.case.id}, {verdict.suite}: {gap.reason}"
        if verdict.passed:
            warnings.warn(f"{told}: passes, take the gap out of your file", StaleGapWarning, stacklevel=2)
        elif gap.symptom in f"{verdict.summary} {verdict.evidence.get('diagnosis', '')}":
            pytest.xfail(f"{told} ({verdict.summary}) {gap.link}".rstrip())


class NoBaselineWarning(UserWarning):
    """A case is not in the baseline, and therefore not gated."""


class UnsureWarning(UserWarning):
    """A gate cannot decide what it was asked for, and lets it pass."""


def expect_no_worse(record: Record, suite: str, baseline: BaselineGate | None) -> None:
    """Fail with the evidence if metrics of `suite` are worse than in `baseline`."""
    __tracebackhide__ = True
    if baseline is None or record.task is Task.FAKE_WORLD:  # whose case has the id of a real world's
        return
    if not baseline.knows(record):
        told = f"baseline {baseline.folder} does not hold {record.case.id}: it is not gated"
        warnings.warn(NoBaselineWarning(told), stacklevel=2)
        return
    changes = baseline.changes(record, suite)
    if failing := baseline.gate.failing(changes):
        rows = [f"{change.metric} {change.difference}" for change in failing]
        pytest.fail(of_changes(record.case.id, str(baseline.folder), rows), pytrace=False)
    for change in baseline.gate.unsure(changes):
        warnings.warn(UnsureWarning(str(change)), stacklevel=2)


def expect_not_wrong(observed: Record | None) -> None:
    """Fail if the instrumented pass of the same case, if there is one, shows that it trains wrongly."""
    __tracebackhide__ = True
    verdict = observed.verdict("equivalence") if observed else None
    if observed and verdict:
        expect_no_gap(observed, verdict)
    if observed and verdict and not verdict.passed and not verdict.undecided:
        first = of_verdict(observed, verdict).partition("\n")[0]  # as the suite says that judged it: one defect
        pytest.fail(f"{first}\n{row('so', 'trains wrongly, so its speed counts for nothing')}", pytrace=False)


class StaleGapWarning(UserWarning):
    """A known gap no longer shows."""


def expect_clause(scenarios: ScenarioRunner, case: Case, clause: Clause) -> None:
    """Fail unless the clause holds for `case`, or fails as its adapter declares."""
    __tracebackhide__ = True
    for record in scenarios.perform_all(clause, case).values():
        if record.outcome.status.outside:
            expect_ran(record)
    found = scenarios.judge(clause, case)
    text = f"{case.adapter} {case.layout.id}, {clause.name}: {found.evidence}"
    if found.result is ClauseResult.UNSUPPORTED:
        pytest.skip(found.evidence)
    if found.result is ClauseResult.TOLD:  # no test can pass that could not have failed
        pytest.skip(f"reported, not required: {found.evidence}")
    if found.result is ClauseResult.KNOWN_GAP:
        pytest.xfail(f"{text} {found.link}".rstrip())
    if found.result is ClauseResult.STALE_GAP:
        warnings.warn(f"{text}: passes, take the known gap out of its adapter", StaleGapWarning, stacklevel=2)
    if found.result in (ClauseResult.FAIL, ClauseResult.UNDECIDED):
        pytest.fail(text, pytrace=False)
