"""A against B on one machine in alternation: pairs in the order AB, BA, each session fresh, until all is decided."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.pluralize import pluralize
from meshmark.regression.change import Change, ChangeOutcome, Effect, Kind
from meshmark.regression.compare import Comparison, compare
from meshmark.regression.runs import by_case
from meshmark.regression.samples import STEP, samples
from meshmark.regression.sequential import LEAST_PAIRS, evidence, half_width
from meshmark.regression.times import ALPHA
from meshmark.run.record import Record

MARGIN = 0.03
"""What is decided: times within this are the same."""

Measure = Callable[[Path], list[Record]]
"""A fresh session into a folder."""


@dataclass(kw_only=True)
class Trial:
    """The pairs of one case."""

    unit: tuple[int, str]
    """How many of what a step trains on."""
    ours: list[float] = field(default_factory=list)
    """Logarithms of A's seconds a step."""
    theirs: list[float] = field(default_factory=list)

    @property
    def differences(self) -> list[float]:
        return [b - a for a, b in zip(self.ours, self.theirs, strict=True)]

    def outcome(self, alpha: float, margin: float) -> ChangeOutcome:
        differences = self.differences
        if len(differences) < LEAST_PAIRS:
            return ChangeOutcome.UNDECIDED
        mean = statistics.fmean(differences)
        if evidence(differences) >= 1 / alpha:
            return ChangeOutcome.WORSE if mean > 0 else ChangeOutcome.BETTER
        within = abs(mean) + half_width(differences, alpha) <= math.log1p(margin)
        return ChangeOutcome.SAME if within else ChangeOutcome.UNDECIDED


def alternate(
    a: Measure, b: Measure, folder: Path, *, most_pairs: int, margin: float = MARGIN, say: Callable[[str], None] = print
) -> Comparison:
    """Runs pairs until every case is decided or `most_pairs` are over. Verdicts and bytes are those of all sessions.

    Raises `ResultsError` where the sides have no case in common.
    """
    trials: dict[str, Trial] = {}
    ours, theirs = list[Record](), list[Record]()
    for pair in range(most_pairs):
        sides = [(a, ours, "a"), (b, theirs, "b")]
        for measure, records, name in sides if pair % 2 == 0 else reversed(sides):
            records += measure(folder / name / f"{pair:03}")
        _add(trials, ours, theirs, pair)
        alpha = ALPHA / max(len(trials), 1)
        open_cases = [case for case, trial in trials.items() if trial.outcome(alpha, margin) is ChangeOutcome.UNDECIDED]
        decided = f"{len(trials) - len(open_cases)} of {pluralize(len(trials), 'case')} decided"
        say(f"pair {pair + 1}: {decided if trials else 'nothing is timed, so one pair does'}")
        if not open_cases and (pair + 1 >= LEAST_PAIRS or not trials):
            break
    found = compare(ours, theirs, across=True)
    alpha = ALPHA / max(len(trials), 1)
    rest = [change for change in found.changes if change.kind is not Kind.SLOWER]
    rows = [change_of(case, trial, alpha, margin) for case, trial in trials.items()]
    return Comparison(
        changes=[*rest, *rows],
        num_cases=found.num_cases,
        only_before=found.only_before,
        only_after=found.only_after,
        conditions=found.conditions,
    )


def _add(trials: dict[str, Trial], ours: Sequence[Record], theirs: Sequence[Record], pair: int) -> None:
    """The launches of `pair`, of cases that both sides have timed in every pair."""
    one, other = by_case(ours), by_case(theirs)
    for key in one.keys() & other.keys():
        before, after = (samples(side[key]).get(STEP, []) for side in (one, other))
        workload = one[key].case.workload
        if len(before) == len(after) == pair + 1:
            trial = trials.setdefault(key[0], Trial(unit=(workload.units_per_step, workload.unit)))
            trial.ours, trial.theirs = [s.log for s in before], [s.log for s in after]
    if not one.keys() & other.keys():
        raise ResultsError(
            "A and B have run no case in common: choose cases that both have, with --adapters or --layouts"
        )


def change_of(case: str, trial: Trial, alpha: float, margin: float) -> Change:
    """How one case stands after its pairs."""
    differences, (amount, unit) = trial.differences, trial.unit
    mean, width = statistics.fmean(differences), half_width(differences, alpha)
    ours, theirs = (amount / math.exp(statistics.fmean(side)) for side in (trial.ours, trial.theirs))
    ends = sorted(math.expm1(min(-end, 700.0)) for end in (mean - width, mean + width))
    outcome = trial.outcome(alpha, margin)
    scatter = statistics.stdev(differences) if len(differences) > 1 else math.inf
    pairs = f"{len(differences)} pairs, which scatter by {scatter:.1%}" if math.isfinite(scatter) else "1 pair"
    told = f"{pairs}; evidence {evidence(differences):.3g}, "
    return Change(
        case=case,
        metric=f"{unit}/s",
        kind=Kind.SLOWER,
        outcome=outcome,
        before=f"{ours:,.0f}",
        after=f"{theirs:,.0f}",
        effect=Effect(estimate=math.expm1(-mean), lowest=ends[0], highest=ends[1]) if math.isfinite(width) else None,
        by=max(math.expm1(mean), 0.0),
        evidence=f"{told}{1 / alpha:,.0f} decides{_more(outcome, scatter, len(differences), margin, alpha)}",
    )


def _more(outcome: ChangeOutcome, scatter: float, pairs: int, margin: float, alpha: float) -> str:
    """How many more pairs would bound a difference to the margin, if they scatter as these do."""
    if outcome is not ChangeOutcome.UNDECIDED:
        return ""
    if not math.isfinite(scatter):
        return "; one pair says nothing of how pairs scatter"
    needed = (2 * math.log(1 / alpha)) * (scatter / math.log1p(margin)) ** 2
    return f"; to tell {margin:.0%} takes about {pluralize(max(math.ceil(needed) - pairs, 1), 'more pair')}"
