"""Test whether times differ: Student's t on the logarithms of launches, corrected for the number of tests.

A pass is one sample, because its steps share whatever its processes met, and its launches share the state of the
machine. Scatter is estimated from repeats of the case itself, or else of other cases. It is never less than the
scatter of a pass's launches, and of blocks of its steps. Nothing is decided without repeats on the machine that a side
was measured on, because scatter differs between machines.

Verdicts of rates, and those of starts, are corrected by Holm's method (Scand. J. Statist. 6, 65, 1979). One false
alarm in any case fails a CI job, so the family-wise error rate is controlled, whatever the dependence between tests.
Benjamini and Hochberg's method controls the false discovery rate, which is for screening.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshmark.measure.laps import PRECISION
from meshmark.regression.change import Change, ChangeOutcome, Effect, Kind
from meshmark.regression.samples import (
    LEAST_DEGREES,
    STEP,
    WORDS,
    Sample,
    Scatter,
    minutes,
    recorded_scatter,
    repeats_scatter,
)
from meshmark.text import pluralize

ALPHA = 0.01
"""Probability that a comparison of equal code calls any time different."""
SAME_WITHIN = PRECISION
"""Times whose interval stays within this share are the same. The timed pass measures to this precision."""
_MOST_LAUNCHES = 1000
_SINGLE = "a single step says nothing of how steps scatter: time at least 2, without --steps or with more"

Pair = tuple[Sequence[Sample], Sequence[Sample]]
Key = tuple[str, str]
"""Case and metric."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """Test of one case and metric. Differences are of logarithms."""

    pair: Pair
    difference: float
    error: float
    """Standard error of the difference."""
    degrees: float
    scatter: Scatter

    @property
    def grounded(self) -> bool:
        """True if scatter was measured on every machine of the launches."""
        return {sample.machine for side in self.pair for sample in side} <= self.scatter.machines

    @property
    def p(self) -> float:
        """p-value of the difference, two-sided."""
        if not math.isfinite(self.error):
            return 1.0
        from scipy.special import stdtr  # takes a quarter of a second, and collecting tests needs none of it

        return 2 * float(stdtr(self.degrees, -abs(self.difference) / self.error)) if self.error else 0.0

    def half_width(self, level: float) -> float:
        """Return the half width of the interval with error rate `level`."""
        return reach(self.degrees, level) * self.error


def reach(degrees: float, level: float) -> float:
    """Return the two-sided critical value of Student's t at `level`."""
    from scipy.special import stdtrit

    return -float(stdtrit(degrees, level / 2))


def test_of(pair: Pair, scatter: Scatter) -> Test:
    """Return the test of two groups of launches with equal scatter."""
    ours, theirs = pair
    difference = statistics.fmean(s.log for s in theirs) - statistics.fmean(s.log for s in ours)
    error = sum((max(scatter.variance, _within(side))) / len(side) for side in pair)
    return Test(pair=pair, difference=difference, error=math.sqrt(error), degrees=scatter.degrees, scatter=scatter)


def _within(side: Sequence[Sample]) -> float:
    return statistics.fmean(s.variance for s in side)


def scatter_of(key: Key, pairs: Mapping[Key, Pair]) -> Scatter:
    """Return the scatter for `key`: its own, that of all cases, or the recorded one."""
    own = repeats_scatter(pairs[key], "{} repeats of this case")
    if own and own.degrees >= LEAST_DEGREES:
        return own
    shared = [side for (_, metric), pair in pairs.items() if metric == key[1] for side in pair]
    borrowed = repeats_scatter(shared, "{} repeats of all cases")
    if borrowed and borrowed.degrees >= LEAST_DEGREES:
        return borrowed
    return recorded_scatter(key[1])


def holm(chances: Mapping[Key, float], alpha: float = ALPHA) -> dict[Key, tuple[bool, float]]:
    """Return by test whether its null hypothesis is rejected, and the level at which that was decided.

    The p-value is at most this level if rejected, and above it otherwise.
    """
    ordered, outcome = sorted(chances, key=lambda key: chances[key]), True
    found, level = dict[Key, tuple[bool, float]](), alpha
    for index, key in enumerate(ordered):
        if outcome:
            level = alpha / (len(ordered) - index)
            outcome = chances[key] <= level
        found[key] = outcome, level
    return found


def time_changes(pairs: Mapping[Key, Pair], units: Mapping[str, tuple[int, str]], margin: float) -> list[Change]:
    """Return the changes of all cases and metrics at once.

    `units` maps a case to the amount and name of the units that a step trains on. `margin` is the difference for which
    undecided rows say how to resolve it.
    """
    tests = {key: test_of(pair, scatter_of(key, pairs)) for key, pair in pairs.items()}
    decided = dict[Key, tuple[bool, float]]()
    for kind in (Kind.SLOWER, Kind.SLOWER_START):
        decided |= holm({key: test.p for key, test in tests.items() if kind_of(key[1]) is kind})
    return [change_of(key, tests[key], decided[key][1], units[key[0]], margin) for key in pairs]


def kind_of(metric: str) -> Kind:
    """Return the kind of a metric of time."""
    return Kind.SLOWER if metric == STEP else Kind.SLOWER_START


def change_of(key: Key, test: Test, level: float, unit: tuple[int, str], margin: float) -> Change:
    """Return the change that `test` shows at `level`. `unit` is the amount and name of what a step trains on."""
    case, metric = key
    width = test.half_width(level)
    lowest, highest = test.difference - width, test.difference + width
    if not test.grounded:
        outcome = ChangeOutcome.UNDECIDED
    elif test.p <= level:
        outcome = ChangeOutcome.WORSE if test.difference > 0 else ChangeOutcome.BETTER
    else:
        within = math.log1p(-margin) < lowest and highest < math.log1p(margin)
        outcome = ChangeOutcome.SAME if within else ChangeOutcome.UNDECIDED
    ours, theirs = (math.exp(statistics.fmean(s.log for s in side)) for side in test.pair)
    before, after, sign = (f"{ours:.3g} s", f"{theirs:.3g} s", 1)
    if metric == STEP:
        before, after, sign = f"{unit[0] / ours:,.0f}", f"{unit[0] / theirs:,.0f}", -1
    bounds = sorted(math.expm1(min(sign * end, 700.0)) for end in (lowest, highest))
    return Change(
        case=case,
        metric=f"{unit[1]}/s" if metric == STEP else WORDS[metric],
        kind=kind_of(metric),
        outcome=outcome,
        before=before,
        after=after,
        effect=Effect(estimate=math.expm1(sign * test.difference), lowest=bounds[0], highest=bounds[1]),
        by=max(math.expm1(test.difference), 0.0),
        evidence=_evidence(test, level, outcome, margin),
    )


def _evidence(test: Test, level: float, outcome: ChangeOutcome, margin: float) -> str:
    ours, theirs = map(len, test.pair)
    launches = (
        f"{ours} and {pluralize(theirs, 'launch', 'launches')}, which scatter by {math.sqrt(test.scatter.variance):.1%}"
    )
    if not test.grounded:
        return f"{launches} ({test.scatter.source}, which decides nothing here); {_ungrounded(test)}"
    told = f"{launches} ({test.scatter.source}); p = {test.p:.2g}, {level:.2g} decides"
    return f"{told}; {_needed(test, level, margin)}" if outcome is ChangeOutcome.UNDECIDED else told


def _ungrounded(test: Test) -> str:
    """Return what would show how launches scatter here."""
    if any(not math.isfinite(s.variance) for side in test.pair for s in side):
        return _SINGLE
    lacking = LEAST_DEGREES - sum(max(len(side) - 1, 0) for side in test.pair)
    if lacking <= 0:
        return "one side was measured on another machine, and once: repeat it there"
    more = pluralize(lacking, "more launch", "more launches")
    return f"to tell how launches scatter on this machine takes {more}, about {minutes(lacking * _took(test))}"


def _took(test: Test) -> float:
    """Return the seconds of another sample, without the start of its session."""
    return max(statistics.fmean(s.took for s in side) for side in test.pair)


def _needed(test: Test, level: float, margin: float) -> str:
    """Return how many launches, with as many steps as before, would detect a difference of `margin`."""
    if any(not math.isfinite(s.variance) for side in test.pair for s in side):
        return _SINGLE
    variance = max(test.scatter.variance, *map(_within, test.pair))
    steps = max(s.steps for side in test.pair for s in side)
    for count in range(2, _MOST_LAUNCHES):
        if reach(2 * count - 2, level) * math.sqrt(2 * variance / count) <= math.log1p(margin):
            more = [max(count - len(side), 0) for side in test.pair]
            many = f" ({more[0] * steps:,} and {more[1] * steps:,} steps)" if steps > 1 else ""
            launches = pluralize(more[0], "more launch", "more launches")
            time = f", about {minutes(sum(more) * _took(test))}" if any(more) else ""
            return f"to tell {margin:.0%} takes {launches} of A and {more[1]} of B{many}{time}"
    return f"to tell {margin:.0%} takes more than {_MOST_LAUNCHES} launches of each: this is too noisy a machine"
