"""Assertion helpers of the suites."""

from __future__ import annotations

import pytest

from meshmark.record import Record, Status


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
        pytest.skip(f"{record.case.workload.model.num_parameters:,} parameters are too many for a float64 truth")
    if not verdict.passed:
        evidence = "\n".join(f"  {name}: {value}" for name, value in verdict.evidence.items())
        pytest.fail(f"{record.case.id}: {verdict.summary}\n{evidence}", pytrace=False)
