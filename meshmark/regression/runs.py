"""Group the records of one side by case, with every launch of a pass."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.records.record import Record, Status
from meshmark.records.record_file import OTHER_RECORD, Reading
from meshmark.records.request import Task
from meshmark.report.table import one_line, visible
from meshmark.spec.case import Case
from meshmark.text import pluralize, some_of

Key = tuple[str, str, str]
"""Case, device, corpus."""


@dataclass(kw_only=True)
class CaseRuns:
    """All records of one case."""

    case: Case
    observed: list[Record] = field(default_factory=list)
    timed: list[Record] = field(default_factory=list)

    @property
    def last(self) -> Record | None:
        """The last instrumented record, or the last timed one if there is none."""
        return next((records[-1] for records in (self.observed, self.timed) if records), None)

    @property
    def complete(self) -> list[Record]:
        """Timed launches that ended successfully."""
        return [r for r in self.timed if r.outcome.status is Status.OK and r.timing.step_seconds]


def key_of(record: Record) -> Key:
    return record.case.id, record.environment.device, record.case.workload.corpus or ""


def by_case(records: Iterable[Record]) -> dict[Key, CaseRuns]:
    """Group the records of the matrix by case. Conformance is compared clause by clause instead."""
    found: dict[Key, CaseRuns] = {}
    for record in records:
        if record.conformance.scenario or record.task in (Task.PROFILE, Task.FAKE_WORLD):
            continue
        runs = found.setdefault(key_of(record), CaseRuns(case=record.case))
        runs.case = record.case
        (runs.timed if record.task is Task.TIME else runs.observed).append(record)
    return found


def names(keys: Sequence[Key]) -> dict[Key, str]:
    """Return row names: the case's id, with device and corpus if the id is ambiguous."""
    ids = [key[0] for key in keys]
    return {key: key[0] if ids.count(key[0]) == 1 else " ".join(filter(None, key)) for key in keys}


def of_last_code(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Split records into those of the code that ran last, and others, because launches of two commits are not one
    sample.

    Code is identified by a commit of Meshmark, a commit of the user's repository and, per case, the digests of the
    user's files.
    """
    if not records:
        return [], []
    last = _code(records[-1])
    sources = {(key_of(record), record.adapter): record.sources for record in records if _code(record) == last}
    kept, others = list[Record](), list[Record]()
    for record in records:
        same = _code(record) == last and record.sources == sources[key_of(record), record.adapter]
        (kept if same else others).append(record)
    return kept, others


def _code(record: Record) -> tuple[str, ...]:
    """Return what tells the code of a record, but for the adapter's."""
    here = record.environment
    return here.commit, here.packages_digest, here.project_commit


def expect_whole(baseline: Path, reading: Reading) -> None:
    """Raise `ResultsError` if lines of a baseline are damaged: their cases would not be gated."""
    if damaged := damaged_lines(reading):
        raise ResultsError(
            f"baseline {str(baseline)!r}: {pluralize(len(damaged), 'line')} cannot be read ({damaged[0]}), so that a "
            "gate would leave out cases; restore its records, or delete the damaged lines"
        )


def damaged_lines(reading: Reading) -> list[str]:
    """Return complaints about lines that cannot be read, any of which may be a wrong case's."""
    return [complaint for complaint in reading.complaints if f": {OTHER_RECORD}" not in complaint]


def complain(path: Path, complaints: Iterable[str]) -> None:
    """Print on stderr what lines of `path` are left out, and why."""
    for complaint in complaints:
        print(f"meshmark: {path}: left out {one_line(complaint)}", file=sys.stderr)


def left_out(kept: Sequence[Record], others: Sequence[Record]) -> str:
    """Return a message about the records of other code in a folder."""
    (last,) = {_commit(record) for record in kept[-1:]}
    commits = dict.fromkeys(commit for record in others if (commit := _commit(record)) != last)
    told = some_of(list(commits)) or "other changes"
    return f"left out {pluralize(len(others), 'record')} of other code ({told}); what counts is the last, {last}"


def _commit(record: Record) -> str:
    return visible(record.environment.project_commit or record.environment.commit or "no commit")


def without_shared(records: Sequence[Record], others: Sequence[Record]) -> list[Record]:
    """Return `records` without those that `others` also has, if their pass was repeated since.

    This keeps a baseline that was accepted from a folder apart from later runs into the same folder.
    """
    shared = {_identity(record) for record in others}
    since = {_pass(record) for record in records if _identity(record) not in shared}
    return [record for record in records if _identity(record) not in shared or _pass(record) not in since]


def _pass(record: Record) -> tuple[object, ...]:
    return record.task, record.conformance.scenario, key_of(record)


def _identity(record: Record) -> tuple[object, ...]:
    return *_pass(record), record.environment.date, record.environment.command, record.launch.seconds
