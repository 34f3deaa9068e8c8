"""The gate of a suite file: what the runs left, beside the baseline; and what it found, where people look."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath

from meshmark.errors import ResultsError
from meshmark.regression.attempts import attempts_of
from meshmark.regression.baseline_gate import suite_of
from meshmark.regression.change import Change, Kind
from meshmark.regression.cli import FAILED, compare_folders, tell
from meshmark.regression.gate import parse_gate
from meshmark.report.github import tell_github
from meshmark.run.record import SCHEMA
from meshmark.run.record_file import Reading, RecordFile, read_records
from meshmark.run.session import Attempt, Ending, Session, standing


def hold(gate: Sequence[str]) -> int:
    """`meshmark compare` by these arguments; what it found stands beside the records from then on, in the place of what
    an earlier one did, so that pages show it."""
    _, baseline, results, _, limits = gate
    _expect_baseline(Path(baseline), results)
    command = shlex.join(["meshmark", *gate])
    print(command, flush=True)
    asked = parse_gate(limits)
    found = compare_folders(Path(baseline), Path(results), asked)
    failing = tell(found, asked)
    read = read_records(Path(results), latest=True)
    missing_failures = _missing_failures(failing, read)
    elsewhere = {change.case for change in failing} - {
        change.case for change in missing_failures
    }  # whose own tests say it
    told = {f"gate[{case}]" for case in elsewhere}
    attempts = [
        attempt for attempt in attempts_of(found, missing_failures, baseline, command) if attempt.test not in told
    ]
    session = Session(
        schema=SCHEMA,
        session=f"gate {baseline}",
        command=command,
        device=read.records[-1].environment.device,
        exit_code=FAILED if failing else 0,
        attempts=[attempt for attempt in attempts if not attempt.conforming],  # clauses fail by tests of their own
    )
    with contextlib.closing(RecordFile(Path(results))) as file:
        file.append(session)
    tell_github(attempts, print, annotated=attempts_of(found, _unannotated(missing_failures, read), baseline, command))
    return FAILED if failing else 0


def _missing_failures(failing: Sequence[Change], read: Reading) -> list[Change]:
    """Without verdicts that became wrong, where a test of the case has failed and says so."""
    failed = {attempt.case for attempt in _failed(read)}
    return [change for change in failing if change.kind is not Kind.WRONG or change.case not in failed]


def _unannotated(missing_failures: Sequence[Change], read: Reading) -> list[Change]:
    """Without bytes that grew, where the suite that judges them has failed: that test is an annotation already."""
    failed = {(attempt.case, PurePath(attempt.test.partition("::")[0]).stem) for attempt in _failed(read)}
    return [
        change
        for change in missing_failures
        if change.kind is not Kind.BIGGER or (change.case, f"test_{suite_of(change.metric)}") not in failed
    ]


def _failed(read: Reading) -> list[Attempt]:
    """Tests, and no findings of a gate's."""
    found = standing(read.sessions, conforming=False)
    return [a for a, by in found if a.ending is Ending.FAILED and not by.session.startswith("gate ")]


def _expect_baseline(baseline: Path, results: str) -> None:
    """Raises `ResultsError` where there is none yet; what was measured can become it."""
    if not baseline.exists():
        raise ResultsError(
            f"no baseline {str(baseline)!r} to hold these results against: `meshmark baseline accept {results} --name "
            f"{baseline.name}` makes them the baseline, if they are as they should be"
        )
