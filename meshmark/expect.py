"""Assertion helpers of the suites."""

from __future__ import annotations

import warnings

import pytest

from meshmark.conformance.clauses import Clause, judge_clause
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario import SCENARIOS
from meshmark.run.record import Record, Status
from meshmark.run.runner import Runner
from meshmark.spec.case import Case


def expect_ran(record: Record) -> None:
    """Skip what was skipped, and fail with the evidence what did not reach its end."""
    __tracebackhide__ = True
    outcome = record.outcome
    if outcome.status is Status.SKIPPED:
        pytest.skip(outcome.message)
    if outcome.status is not Status.OK:
        stacks = "".join(f"\n--- stack of rank {rank}\n{stack}" for rank, stack in outcome.stacks.items())
        details = outcome.traceback or f"--- end of rank {outcome.rank}'s log\n{outcome.log_tail}"
        pytest.fail(
            f"{record.case.id}: {outcome.status} on rank {outcome.rank}: {outcome.message}\n{details}{stacks}",
            pytrace=False,
        )


def expect(record: Record, suite: str) -> None:
    """The verdict of `suite` must be there, and good."""
    __tracebackhide__ = True
    expect_ran(record)
    verdict = record.verdict(suite)
    if verdict is None:
        too_many = f"{record.case.workload.model.num_parameters:,} parameters are too many for a float64 truth"
        pytest.skip(too_many if suite == "equivalence" else f"{suite}: not planned")
    if not verdict.passed:
        evidence = "\n".join(f"  {name}: {value}" for name, value in verdict.evidence.items())
        pytest.fail(f"{record.case.id}: {verdict.summary}\n{evidence}", pytrace=False)


class StaleGapWarning(UserWarning):
    """A known gap that no longer shows."""


def expect_clause(runner: Runner, case: Case, clause: Clause) -> None:
    """The clause must hold of `case`, or fail as its adapter says that it does."""
    __tracebackhide__ = True
    records = {name: runner.perform(SCENARIOS[name], case) for name in clause.scenarios}
    found = judge_clause(clause, records)
    text = f"{case.adapter} {case.layout.id}, {clause.name}: {found.evidence}"
    if found.result is ClauseResult.UNSUPPORTED:
        pytest.skip(found.evidence)
    if found.result is ClauseResult.KNOWN_GAP:
        pytest.xfail(f"{text} {found.link}".rstrip())
    if found.result is ClauseResult.STALE_GAP:
        warnings.warn(f"{text}: passes, take the known gap out of its adapter", StaleGapWarning, stacklevel=2)
    if found.result is ClauseResult.FAIL:
        pytest.fail(text, pytrace=False)
