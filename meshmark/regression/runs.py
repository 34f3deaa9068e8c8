"""The records of one side, by case: of a pass that was launched several times, every launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshmark.run.record import Record, Status
from meshmark.run.request import Task
from meshmark.spec.case import Case

Key = tuple[str, str, str]
"""Case, device, corpus."""


@dataclass(kw_only=True)
class CaseRuns:
    """Every record of one case."""

    case: Case
    observed: list[Record] = field(default_factory=list)
    timed: list[Record] = field(default_factory=list)

    @property
    def last(self) -> Record | None:
        """The instrumented pass that counts; else the timed one."""
        return next((records[-1] for records in (self.observed, self.timed) if records), None)

    @property
    def complete(self) -> list[Record]:
        """Timed launches that came to their end."""
        return [r for r in self.timed if r.outcome.status is Status.OK and r.timing.step_seconds]


def key_of(record: Record) -> Key:
    return record.case.id, record.environment.device, record.case.workload.corpus or ""


def by_case(records: Iterable[Record]) -> dict[Key, CaseRuns]:
    """Of the matrix; conformance is judged clause by clause."""
    found: dict[Key, CaseRuns] = {}
    for record in records:
        if record.conformance.scenario or record.task is Task.PROFILE:
            continue
        runs = found.setdefault(key_of(record), CaseRuns(case=record.case))
        runs.case = record.case
        (runs.timed if record.task is Task.TIME else runs.observed).append(record)
    return found


def names(keys: Sequence[Key]) -> dict[Key, str]:
    """What rows call them: the case's id, and its device and corpus where that alone is not one."""
    ids = [key[0] for key in keys]
    return {key: key[0] if ids.count(key[0]) == 1 else " ".join(filter(None, key)) for key in keys}


def few(cases: Sequence[str]) -> str:
    """The first of them, in words."""
    return f"{', '.join(cases[:3])}{', ...' if len(cases) > 3 else ''}"
