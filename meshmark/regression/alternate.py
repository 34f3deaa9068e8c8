"""Compare A and B on one machine in alternation: pairs in the order AB, BA, in fresh sessions, until all is decided.

Two times of every case are tested. The wall-clock rate is what counts, but other load moves it: on two busy cores,
sessions scatter by a tenth. The processor time of the ranks covers only their own code and scatters by a few per cent,
so it detects extra computation within five pairs. It does not cover waiting, such as a pause or a slower network. The
clock therefore decides where it can, and processor time decides where the clock cannot.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.records.record import Record
from meshmark.regression.change import Change, ChangeOutcome, Effect, Kind, untimed
from meshmark.regression.compare import Comparison, compare
from meshmark.regression.runs import by_case
from meshmark.regression.samples import CPU, STEP, WORDS, Sample, minutes, samples
from meshmark.regression.sequential import LEAST_PAIRS, evidence, half_width
from meshmark.regression.times import ALPHA
from meshmark.text import pluralize

MARGIN = 0.03
"""Times within this share of each other count as the same."""

SIDES = ("a", "b")
"""Folders of both sides' sessions in the folder of results."""

Measure = Callable[[Path], list[Record]]
"""Function that runs a fresh session into a folder."""


@dataclass(kw_only=True)
class Trial:
    """Pairs of one case, for one of its times."""

    unit: tuple[int, str]
    """Amount and name of the units that a step trains on."""
    metric: str = STEP
    ours: list[float] = field(default_factory=list)
    """Logarithms of A's seconds per step."""
    theirs: list[float] = field(default_factory=list)

    def add(self, before: Sample, after: Sample) -> None:
        self.ours.append(before.log)
        self.theirs.append(after.log)

    @property
    def differences(self) -> list[float]:
        return [b - a for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def by(self) -> float:
        """Best estimate of how much longer B takes, as a share of A's time. 0 if B is faster."""
        return max(math.expm1(statistics.fmean(self.differences)), 0.0)

    def outcome(self, alpha: float, margin: float) -> ChangeOutcome:
        differences = self.differences
        if len(differences) < LEAST_PAIRS:
            return ChangeOutcome.UNDECIDED
        mean = statistics.fmean(differences)
        if evidence(differences) >= 1 / alpha:
            return ChangeOutcome.WORSE if mean > 0 else ChangeOutcome.BETTER
        within = abs(mean) + half_width(differences, alpha) <= math.log1p(margin)
        return ChangeOutcome.SAME if within else ChangeOutcome.UNDECIDED


@dataclass(kw_only=True)
class CaseTrials:
    """Both times of one case."""

    clock: Trial
    processor: Trial | None = None
    """None on GPUs, and if a side's Meshmark does not measure it."""

    def outcome(self, alpha: float, margin: float) -> ChangeOutcome:
        """Return the clock's outcome if it is decided; otherwise *worse* if processor time grew by at least the
        margin.
        """
        if self.processor is None:
            return self.clock.outcome(alpha, margin)
        found = self.clock.outcome(alpha / 2, margin)
        if found is not ChangeOutcome.UNDECIDED:
            return found
        slower = self.processor.outcome(alpha / 2, margin) is ChangeOutcome.WORSE
        return ChangeOutcome.WORSE if slower and self.processor.by >= margin else ChangeOutcome.UNDECIDED

    def changes(self, case: str, alpha: float, margin: float, pair_seconds: float) -> list[Change]:
        """Return one row per time. Processor time is gated only if the clock is undecided."""
        if self.processor is None:
            return [change_of(case, self.clock, alpha, margin, pair_seconds)]
        clock, processor = (
            change_of(case, trial, alpha / 2, margin, pair_seconds) for trial in (self.clock, self.processor)
        )
        if clock.outcome is not ChangeOutcome.UNDECIDED or processor.outcome is ChangeOutcome.UNDECIDED:
            return [clock, dataclasses.replace(processor, gated=False)]
        if processor.outcome is ChangeOutcome.WORSE and processor.by >= margin:
            return [dataclasses.replace(clock, gated=False), processor]
        return [clock, processor]


def alternate(
    a: Measure, b: Measure, folder: Path, *, most_pairs: int, margin: float = MARGIN, say: Callable[[str], None] = print
) -> Comparison:
    """Run pairs until every case is decided or `most_pairs` are done. Verdicts and bytes include all sessions.

    Raises `ResultsError` if the sides have no case in common.
    """
    trials: dict[str, CaseTrials] = {}
    ours, theirs, timed = list[Record](), list[Record](), list[str]()
    started, pair_seconds = time.monotonic(), 0.0
    for pair in range(most_pairs):
        sides = [(a, ours, SIDES[0]), (b, theirs, SIDES[1])]
        of_pair = dict[str, list[Record]]()
        for measure, records, name in sides if pair % 2 == 0 else reversed(sides):
            of_pair[name] = measure(folder / name / f"{pair:03}")
            records += of_pair[name]
        if not by_case(ours).keys() & by_case(theirs).keys():
            raise ResultsError(
                "A and B have run no case in common: choose cases that both have, with --adapters or --layouts"
            )
        _add(trials, of_pair[SIDES[0]], of_pair[SIDES[1]])
        alpha, seconds = ALPHA / max(len(trials), 1), time.monotonic() - started
        pair_seconds = seconds / (pair + 1)
        open_cases = [case for case, trial in trials.items() if trial.outcome(alpha, margin) is ChangeOutcome.UNDECIDED]
        timed = [key[0] for key, runs in by_case([*ours, *theirs]).items() if runs.complete]
        decided = f"{len(trials) - len(open_cases)} of {pluralize(len(timed), 'case')} decided"
        say(f"pair {pair + 1}: {decided if timed else 'nothing is timed, so one pair does'}; {seconds:.0f} s")
        if not timed or (not open_cases and pair + 1 >= LEAST_PAIRS):
            break
    if _code_of(ours) == _code_of(theirs):
        say(
            "note: both sides ran the same code, for all that their cases import is the same. A package that is "
            "installed here is of neither side: install it as an editable one, or put its folder on PYTHONPATH"
        )
    found = compare(ours, theirs, across=True)
    alpha = ALPHA / max(len(trials), 1)
    rest = [change for change in found.changes if change.kind is not Kind.SLOWER]
    rows = [row for case, trial in trials.items() for row in trial.changes(case, alpha, margin, pair_seconds)]
    never = "in no pair have both sides timed it to the end"
    rows += [untimed(case, never) for case in dict.fromkeys(timed) if case not in trials]
    return dataclasses.replace(found, changes=[*rest, *rows])


def _code_of(records: Sequence[Record]) -> set[str]:
    """Return what is known of the code that each case ran."""
    return {
        repr((r.case.id, r.sources, r.environment.commit, r.environment.packages_digest, r.environment.versions))
        for r in records
    }


def _add(trials: dict[str, CaseTrials], ours: Sequence[Record], theirs: Sequence[Record]) -> None:
    """Add the records of one pair, for the cases that both sides have timed in it. Another pair may lack a case, as
    after a hang.
    """
    one, other = by_case(ours), by_case(theirs)
    for key in one.keys() & other.keys():
        before, after = (samples(side[key]) for side in (one, other))
        if STEP not in before or STEP not in after:
            continue
        workload = one[key].case.workload
        unit = workload.units_per_step, workload.unit
        trial = trials.setdefault(key[0], CaseTrials(clock=Trial(unit=unit)))
        trial.clock.add(before[STEP][-1], after[STEP][-1])
        if CPU in before and CPU in after:
            trial.processor = trial.processor or Trial(unit=unit, metric=CPU)
            trial.processor.add(before[CPU][-1], after[CPU][-1])


def change_of(case: str, trial: Trial, alpha: float, margin: float, pair_seconds: float) -> Change:
    """Return the change of one time of a case after its pairs."""
    differences, (amount, unit) = trial.differences, trial.unit
    mean, width = statistics.fmean(differences), half_width(differences, alpha)
    ours, theirs = (math.exp(statistics.fmean(side)) for side in (trial.ours, trial.theirs))
    before, after, sign = f"{amount / ours:,.0f}", f"{amount / theirs:,.0f}", -1
    if trial.metric == CPU:
        before, after, sign = f"{ours:.3g} s", f"{theirs:.3g} s", 1
    ends = sorted(math.expm1(min(sign * end, 700.0)) for end in (mean - width, mean + width))
    outcome = trial.outcome(alpha, margin)
    scatter = statistics.stdev(differences) if len(differences) > 1 else math.inf
    pairs = f"{len(differences)} pairs, which scatter by {scatter:.1%}" if math.isfinite(scatter) else "1 pair"
    told = f"{pairs}; evidence {evidence(differences):.3g}, "
    more = _more(outcome, scatter, len(differences), margin, alpha, pair_seconds)
    effect = Effect(estimate=math.expm1(sign * mean), lowest=ends[0], highest=ends[1])
    return Change(
        case=case,
        metric=f"{unit}/s" if trial.metric == STEP else WORDS[CPU],
        kind=Kind.SLOWER,
        outcome=outcome,
        before=before,
        after=after,
        effect=effect if math.isfinite(width) else None,
        by=trial.by,
        evidence=f"{told}{1 / alpha:,.0f} decides{more}",
    )


def _more(outcome: ChangeOutcome, scatter: float, pairs: int, margin: float, alpha: float, pair_seconds: float) -> str:
    """Return how many more pairs, and minutes, would bound a difference to the margin if scatter stays the same."""
    if outcome is not ChangeOutcome.UNDECIDED:
        return ""
    if not math.isfinite(scatter):
        return "; one pair says nothing of how pairs scatter"
    needed = (2 * math.log(1 / alpha)) * (scatter / math.log1p(margin)) ** 2
    more = max(math.ceil(needed) - pairs, 1)
    return f"; to tell {margin:.0%} takes about {pluralize(more, 'more pair')}, {minutes(more * pair_seconds)}"
