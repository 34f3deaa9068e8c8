"""Compare two sides, case by case and metric by metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from meshmark.errors import ResultsError
from meshmark.records.record import Record, Status
from meshmark.records.record_file import Ending, Session, latest_attempts
from meshmark.records.request import Task
from meshmark.regression.change import Change, ChangeOutcome, Kind, incomparable
from meshmark.regression.conditions import differences, expect_alike
from meshmark.regression.exact import exact_changes
from meshmark.regression.runs import CaseRuns, Key, by_case, names
from meshmark.regression.samples import BUILD, LAUNCH, STEP, samples
from meshmark.regression.times import SAME_WITHIN, Pair, time_changes
from meshmark.regression.times import Key as TestKey
from meshmark.regression.verdicts import clause_changes, verdict_changes
from meshmark.text import some_of

_ALONE = " (records of fake worlds are held to the plan alone, and compared with nothing)"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of comparing B with A."""

    changes: list[Change]
    """Changes of every case, in A's order."""
    num_cases: int
    """Cases that both sides have."""
    only_before: list[str]
    only_after: list[str]
    conditions: dict[str, tuple[str, str]]
    """Conditions that differ, by name, with A's and B's values."""

    def of(self, outcome: ChangeOutcome) -> list[Change]:
        return [change for change in self.changes if change.outcome is outcome]


def compare(
    before: Sequence[Record],
    after: Sequence[Record],
    *,
    across: bool = False,
    timed: bool = True,
    margin: float | None = None,
) -> Comparison:
    """Compare two lists of records. Without `timed`, times are left out.

    Raises `ResultsError` if they have no case in common, or (without `across`) were measured under different
    conditions.
    """
    ours, theirs = by_case(before), by_case(after)
    common = [key for key in ours if key in theirs]
    clauses = list(clause_changes(before, after))
    if not common and not clauses:
        raise ResultsError(
            f"A and B have no case in common: A holds {_some(ours)}, B {_some(theirs)}; run the same cases into both"
            f"{_ALONE if any(r.task is Task.FAKE_WORLD for r in (*before, *after)) else ''}"
        )
    different = differences(_records(ours, common), _records(theirs, common))
    if not across:
        expect_alike(different, timed=timed)
    name = names(list(ours | theirs))
    changes = [change for key in common for change in _untimed(name[key], ours[key], theirs[key])]
    changes += [gone for key in ours if (gone := _missing(name[key], ours[key], theirs.get(key), timed))]
    times = _timed(ours, theirs, name, margin) if timed else []
    return Comparison(
        changes=[*changes, *clauses, *times],
        num_cases=len(common),
        only_before=[name[key] for key in ours if key not in theirs],
        only_after=[name[key] for key in theirs if key not in ours],
        conditions=different,
    )


def _some(cases: dict[Key, CaseRuns]) -> str:
    return some_of([key[0] for key in cases]) or "none of the matrix"


def _records(cases: dict[Key, CaseRuns], keys: Sequence[Key]) -> list[Record]:
    return [record for key in keys for record in (*cases[key].observed, *cases[key].timed)]


def _untimed(name: str, before: CaseRuns, after: CaseRuns) -> list[Change]:
    if before.case != after.case:
        return [incomparable(name)]
    return [*verdict_changes(name, before, after), *exact_changes(name, before, after)]


def _missing(name: str, ours: CaseRuns, theirs: CaseRuns | None, timed: bool) -> Change | None:
    """Return a change if B did not run, or last skipped, a case that A ran; or did not time it where times count."""
    passes = [(ours.observed, theirs.observed if theirs else []), (ours.timed, theirs.timed if theirs else [])]
    ran = [after[-1:] for before, after in passes if any(r.outcome.status is not Status.SKIPPED for r in before)]
    skipped = [record for last in ran for record in last if record.outcome.status is Status.SKIPPED]
    untimed = (
        timed
        and theirs is not None
        and not any(r.outcome.status is Status.OK for r in theirs.timed)
        and any(r.outcome.status is Status.OK for r in ours.timed)
    )
    if not ran or (theirs and not skipped and not untimed):
        return None
    return Change(
        case=name,
        metric="case",
        kind=Kind.MISSING,
        outcome=ChangeOutcome.WORSE,
        before="run",
        after="skipped" if skipped else "not timed" if untimed else "not run",
        evidence=skipped[0].outcome.message if skipped else f"it is {'timed ' * untimed}in A alone",
    )


def unfinished_changes(found: Comparison, before: Sequence[Record], sessions: Iterable[Session]) -> list[Change]:
    """Return a change for every test of B, on a case that A ran, that no session of B finished.

    Without them, a run that was killed passes a gate on the verdicts that it had reached. Cases that are missing as a
    whole are in `found` already.
    """
    ran = {(record.conformance.base or record.case).id for record in before} - {*found.only_before}
    attempts = (latest for conforming in (False, True) for latest in latest_attempts(sessions, conforming=conforming))
    return [
        Change(
            case=attempt.case,
            metric=PurePath(attempt.test.partition("::")[0]).stem,
            kind=Kind.MISSING,
            outcome=ChangeOutcome.WORSE,
            before="run",
            after="not ended",
            evidence="B was ended before it; the same command with --resume runs what is left",
        )
        for attempt, _ in attempts
        if attempt.ending is Ending.UNFINISHED and attempt.case in ran
    ]


def _timed(
    ours: dict[Key, CaseRuns], theirs: dict[Key, CaseRuns], name: dict[Key, str], margin: float | None
) -> list[Change]:
    pairs, units = dict[TestKey, Pair](), dict[str, tuple[int, str]]()
    for key, runs in ours.items():
        if key not in theirs or runs.case != theirs[key].case:
            continue
        units[name[key]] = runs.case.workload.units_per_step, runs.case.workload.unit
        before, after = samples(runs), samples(theirs[key])
        pairs |= {
            (name[key], metric): (before[metric], after[metric])
            for metric in (STEP, LAUNCH, BUILD)
            if metric in before and metric in after
        }
    return time_changes(pairs, units, margin or SAME_WITHIN)
