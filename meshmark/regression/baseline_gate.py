"""Compare single records of this session with a baseline, as `pytest suites --baseline` does test by test."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark.environment import Environment
from meshmark.errors import InputError, ResultsError
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.records.request import Task
from meshmark.regression.change import Change, Kind, incomparable, untimed
from meshmark.regression.conditions import _joined, conditions, conditions_here, hinders, without
from meshmark.regression.exact import exact_changes
from meshmark.regression.gate import Gate
from meshmark.regression.runs import CaseRuns, Key, by_case, expect_whole, key_of, of_last_code
from meshmark.regression.samples import STEP, Sample, samples
from meshmark.regression.times import ALPHA, SAME_WITHIN, change_of, scatter_of, test_of
from meshmark.regression.times import Key as TestKey
from meshmark.regression.verdicts import verdict_changes
from meshmark.spec.case import Case
from meshmark.text import some_of

PER_TEST = (Kind.WRONG, Kind.BIGGER, Kind.SLOWER)
"""Kinds of change that a single case shows, without the others of its session."""


def suite_of(metric: str) -> str:
    """Return the suite that judges a metric of bytes."""
    return "communication" if metric.startswith("traffic") else "memory"


@dataclass(frozen=True, kw_only=True)
class BaselineGate:
    """A baseline, and the changes that fail against it."""

    folder: Path
    cases: dict[Key, CaseRuns]
    gate: Gate
    num_timed: int = 1
    """Number of timed cases in the session.

    The false alarm rate is shared among them (Bonferroni), because each case is decided as soon as it has run.
    """

    def knows(self, record: Record) -> bool:
        return key_of(record) in self.cases

    def changes(self, record: Record, suite: str) -> list[Change]:
        """Return the changes of the metrics that belong to `suite`."""
        before, after = self.cases[key_of(record)], CaseRuns(case=record.case)
        (after.timed if record.task is Task.TIME else after.observed).append(record)
        if before.case != after.case:
            return [incomparable(record.case.id)]
        name = record.case.id
        changes = [c for c in verdict_changes(name, before, after) if c.metric == f"{suite} verdict"]
        changes += [c for c in exact_changes(name, before, after) if suite_of(c.metric) == suite]
        if suite == "throughput":
            changes += self._time(before, after)
        return changes

    def _time(self, before: CaseRuns, after: CaseRuns) -> list[Change]:
        new = samples(after).get(STEP)
        pairs: dict[TestKey, tuple[Sequence[Sample], Sequence[Sample]]] = {
            (runs.case.id, STEP): (found[STEP], ()) for runs in self.cases.values() if STEP in (found := samples(runs))
        }
        key = after.case.id, STEP
        if not new or Kind.SLOWER not in self.gate.limits:
            return []
        if key not in pairs:
            why = "the baseline has not timed it: accept one of suites/test_throughput.py as well"
            return [untimed(after.case.id, why)]
        test = test_of((pairs[key][0], new), scatter_of(key, pairs))
        level = ALPHA / self.num_timed
        workload = after.case.workload
        unit = workload.units_per_step, workload.unit
        return [change_of(key, test, level, unit, self.gate.margin or SAME_WITHIN)]


def baseline_gate(folder: Path, gate: Gate) -> BaselineGate:
    """Return the gate of a baseline folder. Raises `ResultsError` when the folder cannot be read."""
    reading = read_records(folder)
    expect_whole(folder, reading)
    return BaselineGate(folder=folder, cases=by_case(of_last_code(reading.records)[0]), gate=gate)


def expect_conditions(keeper: BaselineGate, here: Environment) -> None:
    """Raise `ResultsError` if this session runs under other conditions than the baseline."""
    values: dict[str, set[str]] = {}
    for runs in keeper.cases.values():
        for record in (*runs.observed, *runs.timed):
            if record.environment.device == here.device:
                for name, value in conditions(record).items():
                    values.setdefault(name, set()).add(value)
    ours = {n: value for n, value in conditions_here(here).items() if value and hinders(n, timed=keeper.gate.timed)}
    different = {
        name: f"{name}: {_joined(values[name])} there, {value} here"
        for name, value in ours.items()
        if values.get(name, {""}) - {""} and values[name] != {value}
    }
    if different:
        raise ResultsError(
            f"baseline {str(keeper.folder)!r} was measured under other conditions ({'; '.join(different.values())}): "
            "accept one that was made here, or give --across where the conditions are what you compare"
            f"{without(different)}"
        )


def expect_gated(cases: Collection[Case]) -> None:
    """Raise `InputError` when a session with a baseline has no cases that a baseline can hold."""
    if not cases:
        raise InputError(
            "--baseline: this session has only fake worlds, which are compared with the plan and are in no baseline; "
            "leave out --baseline, or add a suite that starts every rank, such as suites/test_memory.py"
        )


def expect_cases(keeper: BaselineGate, cases: Collection[str]) -> None:
    """Raise `ResultsError` if the baseline has none of `cases`, which are ids."""
    known = sorted({key[0] for key in keeper.cases})
    if cases and not set(cases) & set(known):
        raise ResultsError(
            f"baseline {str(keeper.folder)!r} holds no case of this session ({some_of(sorted(cases))}): it holds "
            f"{some_of(known)}; choose those cases, or accept a baseline of these"
        )
