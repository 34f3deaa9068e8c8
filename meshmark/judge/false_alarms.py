"""How often correct runs fail: measured frequencies, as opposed to the tolerance model's target.

`make power-long` runs correct training, of `single` and of real adapters, and writes the counts to `false_alarms.json`
in this folder. A run with the same bits as another shows nothing and is not counted. Runs of one problem share its
tolerance models, so they are more alike than runs of several problems. They are worth as many independent runs as
their number divided by their design effect (Kish, Survey Sampling, 1965).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshmark.serial import decode

COUNTED = Path(__file__).with_name("false_alarms.json")
CONFIDENCE = 0.95
CLOSE = 0.02
"""Share of all runs."""


@dataclass(frozen=True, kw_only=True)
class AlarmCounts:
    """Counts of correct runs of one problem."""

    what: str
    """How the runs were made, their workload and precision."""
    problems: int
    """Number of problems with different seeds, numbers of micro-batches, or both."""
    tolerance_models: int
    """Number of tolerance models, each from separate noise runs."""
    runs: int
    """Number of runs, no two with the same bits."""
    alarms: int


@dataclass(frozen=True, kw_only=True)
class FalseAlarms:
    """All counts under one version of the tolerance model."""

    version: int
    """Version of the noise and its factors: `passes.noise.FORMAT`."""
    machines: list[str]
    torch: list[str]
    design_effect: float = 1.0
    counted: list[AlarmCounts] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(c.runs for c in self.counted)

    @property
    def alarms(self) -> int:
        return sum(c.alarms for c in self.counted)

    @property
    def independent(self) -> int:
        """Number of runs of distinct problems that would show as much."""
        return int(self.runs / self.design_effect)

    @property
    def bound(self) -> float:
        """Upper limit of the probability that a correct run fails, by Clopper and Pearson.

        It assumes the effective number of independent runs with the same share of alarms (Korn and Graubard, Survey
        Methodology 24, 1998).
        """
        return upper_limit(self.alarms / self.design_effect, self.runs / self.design_effect)

    def __str__(self) -> str:
        if not self.runs:
            return "not counted yet: run make power-long"
        what = f"{self.alarms} alarms" if self.alarms > 1 else "1 alarm" if self.alarms else "no alarm"
        worth = f"which show as much as {self.independent:,} independent ones"
        return f"{what} in {self.runs:,} correct runs, {worth}: below {self.bound:.2g} ({CONFIDENCE:.0%})"


def design_effect(groups: Sequence[Sequence[float]]) -> float:
    """Return how much more the share of runs close to an alarm varies between problems than for independent runs.

    It is at least one. `groups` is the largest excess of every run, by problem. Alarms themselves are too rare, so the
    furthest CLOSE of all runs are used.
    """
    sizes = np.array([len(group) for group in groups])
    if sizes.sum() < 1 / CLOSE or len(groups) < 2:
        return 1.0
    limit = np.quantile(np.concatenate([np.asarray(group) for group in groups]), 1 - CLOSE)
    close = np.array([np.sum(np.asarray(group) > limit) for group in groups])
    share = close.sum() / sizes.sum()
    if not 0 < share < 1:
        return 1.0
    scatter = np.sum((close - share * sizes) ** 2) * len(groups) / (len(groups) - 1)
    return max(float(scatter / (sizes.sum() * share * (1 - share))), 1.0)


def upper_limit(num_events: float, num_trials: float, confidence: float = CONFIDENCE) -> float:
    """Return the probability at which `num_events` or fewer in `num_trials` have a chance of 1 - `confidence`.

    Neither number needs to be an integer.
    """
    from scipy.special import betaincinv  # takes a quarter of a second, and few commands need it

    return float(betaincinv(num_events + 1, num_trials - num_events, confidence)) if num_events < num_trials else 1.0


def merged(parts: Sequence[AlarmCounts]) -> list[AlarmCounts]:
    """Add up counts with the same description."""
    found: dict[str, AlarmCounts] = {}
    for part in parts:
        so_far = found.get(part.what, AlarmCounts(what=part.what, problems=0, tolerance_models=0, runs=0, alarms=0))
        found[part.what] = AlarmCounts(
            what=part.what,
            problems=so_far.problems + part.problems,
            tolerance_models=so_far.tolerance_models + part.tolerance_models,
            runs=so_far.runs + part.runs,
            alarms=so_far.alarms + part.alarms,
        )
    return [found[what] for what in sorted(found)]


@functools.cache
def shown() -> FalseAlarms:
    """Return the counts under this version of the tolerance model."""
    counted: FalseAlarms = decode(FalseAlarms, json.loads(COUNTED.read_text()))
    return counted
