"""Laps that ranks start together, the interval of a rate, and when there are steps enough."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmark.measure.laps import LEAST_SETTLED, is_settled, laps_of, mean_interval, num_steps_to_add, student_t

ALIKE = 0.6
"""Correlation of neighbours."""


def dependent_steps(count: int, rng: np.random.Generator, *, scatter: float = 0.1) -> NDArray[np.float64]:
    """Around one second."""
    steps = [rng.standard_normal()]
    for _ in range(count - 1):
        steps.append(ALIKE * steps[-1] + math.sqrt(1 - ALIKE**2) * rng.standard_normal())
    return 1 + scatter * np.array(steps)


@pytest.mark.parametrize(
    "degrees, published", [(1, 12.706), (2, 4.303), (7, 2.365), (9, 2.262), (30, 2.042), (120, 1.980)]
)
def test_students_t_is_that_of_the_tables(degrees: int, published: float) -> None:
    assert student_t(degrees) == pytest.approx(published, abs=5e-4)


def test_the_interval_of_independent_steps_is_the_textbook_s() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.block) == (3.0, 1)
    assert found.half_width == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)


def test_one_step_has_no_interval() -> None:
    assert mean_interval([1.0]).half_width == math.inf


def test_the_interval_holds_the_rate_where_neighbours_are_alike() -> None:
    """One that took steps for independent would hold it in 68 % of runs."""
    rng, held, held_by_steps, runs = np.random.default_rng(0), 0, 0, 300
    for _ in range(runs):
        steps = dependent_steps(160, rng)
        found = mean_interval(list(steps))
        held += abs(found.mean - 1) <= found.half_width
        held_by_steps += abs(found.mean - 1) <= student_t(159) * steps.std(ddof=1) / math.sqrt(160)
    assert held > 0.9 * runs
    assert held_by_steps < 0.75 * runs


def test_a_lap_lasts_from_the_first_rank_s_start_to_the_last_one_s_end() -> None:
    """The ranks take turns in being slow: the sum of the slowest of every step would say 6 seconds."""
    (lap,) = laps_of([[1.0, 3.0], [3.0, 1.0]])
    assert lap.ends == [3.0, 4.0]
    assert lap.step_seconds == [3.0, 1.0]
    assert lap.gaps == [2.0, 0.0]


def test_a_rank_that_starts_late_is_on_the_clock_from_the_first_one_s_start() -> None:
    first, second = laps_of([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[0.0, 0.5], [0.25, 0.0]], [1, 2])
    assert (first.ends, second.ends) == ([1.25], [1.5, 2.5])


def test_steps_are_added_until_the_rate_is_known_or_the_budget_is_spent() -> None:
    steady = [1.0, 1.001] * LEAST_SETTLED
    assert is_settled(len(steady), mean_interval(steady)) and num_steps_to_add(steady, 1e6) == 0
    assert not is_settled(LEAST_SETTLED - 1, mean_interval(steady[: LEAST_SETTLED - 1]))
    assert num_steps_to_add(steady[:10], 1e6) == 10, "as many again"
    assert num_steps_to_add(steady[:10], 17.5) == 7, "what the budget has room for"
    assert num_steps_to_add(steady[:10], 14.0) == 0, "too few for a lap"
    restless = [1.0, 1.5] * LEAST_SETTLED
    assert not is_settled(len(restless), mean_interval(restless)) and num_steps_to_add(restless, 1e6) == len(restless)
