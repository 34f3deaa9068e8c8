"""Bounds that the planner's errors must hold, beside the goals that they should reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.plan.prediction import MEMORY_ERROR
from studies.validate_sweep import (
    MEMORY_GOAL,
    REGRET_MEDIAN_GOAL,
    REGRET_WORST_GOAL,
    TIME_GOAL,
    Choice,
    SweepReport,
)

MEMORY_BOUND, TIME_BOUND, REGRET_MEDIAN_BOUND, REGRET_WORST_BOUND = MEMORY_ERROR, 0.21, 0.01, 0.75
"""Bounds that docs/planner.md publishes: a planner that does worse makes the page untrue."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One error on data that the rates were not fitted to; less is better."""

    name: str
    value: float
    bound: float
    """It must not exceed this."""
    goal: float
    """It would be good at."""

    @property
    def holds(self) -> bool:
        return self.value <= self.bound

    @property
    def bound_line(self) -> str:
        return f"{self.name} {self.value:.4f} bound {self.bound:.2f} {'held' if self.holds else 'BROKEN'}"

    @property
    def goal_line(self) -> str:
        return f"{self.name} {self.value:.4f} goal {self.goal:.2f} {'met' if self.value <= self.goal else 'missed'}"


def figures(reports: Sequence[SweepReport], choices: Sequence[Choice]) -> list[Figure]:
    """Return the errors of each model by rates fitted to the other, and of the choices made with them."""
    found = [
        Figure(name=_name("memory", r), value=r.memory.mean, bound=MEMORY_BOUND, goal=MEMORY_GOAL) for r in reports
    ]
    found += [Figure(name=_name("time", r), value=r.time.mean, bound=TIME_BOUND, goal=TIME_GOAL) for r in reports]
    regrets = np.array([choice.regret for choice in choices])
    median, worst = float(np.median(regrets)), float(regrets.max())
    return [
        *found,
        Figure(name="regret_median", value=median, bound=REGRET_MEDIAN_BOUND, goal=REGRET_MEDIAN_GOAL),
        Figure(name="regret_worst", value=worst, bound=REGRET_WORST_BOUND, goal=REGRET_WORST_GOAL),
    ]


def _name(what: str, report: SweepReport) -> str:
    return f"{what}_mean_error_{report.model.lower()}_fitted_to_{report.fitted_to.lower()}"


def summary(found: Sequence[Figure]) -> str:
    """The last line, and why the command ends as it does."""
    held, met = sum(f.holds for f in found), sum(f.value <= f.goal for f in found)
    return f"{held} of {len(found)} bounds held, which must; {met} of {len(found)} goals met, which need not yet"


def exit_code(found: Sequence[Figure]) -> int:
    """1 when a bound is broken; a figure that is no number breaks its own."""
    return 0 if all(f.holds for f in found) else 1
