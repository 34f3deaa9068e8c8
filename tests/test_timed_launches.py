"""How many launches the untouched pass of a case takes, and what they leave in its record."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshmark.launch.launch import LaunchResult
from meshmark.measure.laps import LEAST_LAUNCHES, LEAST_SETTLED
from meshmark.records.rank_report import RankFailure, RankReport
from meshmark.records.record import Status
from meshmark.run.throughput import LEAST_CLAIMED, MOST_LAUNCHES, is_wanted, relaunch_of

LONG = 1e9


def launched(step_seconds: Sequence[float], failures: Sequence[RankFailure] = ()) -> LaunchResult:
    """Return the result of two ranks that start a tenth of a second apart and end together."""
    reports = [
        RankReport(
            rank=rank,
            build_seconds=0,
            run_seconds=0,
            losses=[0.5] * len(step_seconds),
            step_seconds=[step_seconds[0] - start, *step_seconds[1:]],
            lap_starts=[start],
            lap_steps=[len(step_seconds)],
            timed_digests={len(step_seconds): "a"},
        )
        for rank, start in enumerate((0.0, 0.1))
    ]
    return LaunchResult(reports=reports, failures=list(failures), seconds=3)


def test_another_launch_is_wanted_until_the_rate_is_known() -> None:
    steady = launched([1.0] * LEAST_SETTLED)
    assert all(is_wanted([steady] * count, LONG) for count in range(1, LEAST_LAUNCHES))
    assert not is_wanted([steady] * LEAST_LAUNCHES, LONG)
    apart = [launched([seconds] * LEAST_SETTLED) for seconds in (1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1)]
    assert is_wanted(apart[:LEAST_LAUNCHES], LONG), "their steps agree, and the launches do not"
    assert not is_wanted(apart, LONG) and len(apart) == MOST_LAUNCHES


@pytest.mark.parametrize(("budget", "wanted"), [(0.0, False), (8.9, False), (9.1, True)])
def test_no_launch_is_begun_after_the_budget_of_timed_steps(budget: float, wanted: bool) -> None:
    assert is_wanted([launched([1.0] * 3)] * 3, budget) is wanted


def test_two_launches_bound_no_rate() -> None:
    assert is_wanted([launched([1.0] * 3)] * 2, 0.1) and not is_wanted([launched([1.0] * 3)] * 2, 0.0)


def test_a_launch_that_failed_is_the_last() -> None:
    failure = RankFailure(rank=1, kind=Status.RAISED, message="no more", time=0)
    assert not is_wanted([launched([1.0] * 9), launched([1.0] * 9, [failure])], LONG)


def test_a_record_keeps_of_a_relaunch_what_the_rate_and_the_verdict_take() -> None:
    found = relaunch_of(launched([1.0, 2.0]))
    assert found.rank_step_seconds == [[1.0, 2.0], [0.9, 2.0]] and found.rank_starts == [[0.0], [0.1]]
    assert found.losses == [1.0, 1.0] and found.digests == {2: "a"}


def test_on_gpus_there_are_as_many_launches_as_a_claim_takes() -> None:
    """Ten steps of a large model on eight GPUs are longer than all of the budget: it was one launch, of which nothing
    is claimed."""
    slow = launched([1.0] * 10)
    assert not is_wanted([slow], 1.5) and is_wanted([slow], 1.5, on_gpu=True)
    assert is_wanted([slow] * 2, 1.5, on_gpu=True) and not is_wanted([slow] * LEAST_CLAIMED, 1.5, on_gpu=True)
    assert not is_wanted([slow], 0.0, on_gpu=True), "where a single launch was asked for"
