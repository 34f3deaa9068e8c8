"""Baselines: accepted records in compact form, with the conditions they were measured under."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePath

from meshmark.errors import InputError, ResultsError
from meshmark.records.record import EquivalenceEvidence, Outcome, Record, Relaunch, Status, TimingEvidence
from meshmark.records.record_file import Ending, Reading, RecordFile, latest_attempts, read_records
from meshmark.records.request import Task
from meshmark.regression.conditions import conditions
from meshmark.regression.runs import complain, damaged_lines, left_out, of_last_code
from meshmark.run.throughput import throughput

FOLDER = "baselines"
ABOUT = "baseline.json"
"""File with the conditions of a baseline. A folder without it was not written by this command."""
NOISY = 0.1
"""Largest half width of a rate's 95 % interval, as a share of the rate. Above it a baseline hides changes."""
ALLOWED = ("wrong", "noisy", "unfinished")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_SECONDS_DIGITS = 7


def find_baseline(name: str | Path, here: Path) -> Path:
    """Return the folder of the baseline `name`: its path, or `baselines/NAME` in the folder `here` or a parent.

    Raises `ResultsError` if there is none, or if it could be either of two.
    """
    given, kept = here / name, _kept_baseline(name, here)
    holds_records = given.is_file() or (given / "records.jsonl").exists()
    if holds_records and kept and not kept.samefile(given) and os.sep not in str(name):
        raise ResultsError(
            f"baseline {str(name)!r} is {given} or {kept}: name one of them by its path, such as {given.absolute()}"
        )
    if holds_records:
        return given
    if kept:
        return kept
    known = sorted(path.parent.name for path in (here / FOLDER).glob("*/records.jsonl"))
    listed = f"{FOLDER}/ holds {', '.join(known)}" if known else f"there is none in {FOLDER}/"
    raise ResultsError(
        f"no baseline {str(name)!r}: {listed}; `meshmark baseline accept RESULTS --name {Path(name).name}` makes one"
    )


def _kept_baseline(name: str | Path, here: Path) -> Path | None:
    for folder in (here, *here.parents):
        if (found := folder / FOLDER / name).is_dir():
            return found
        if (folder / ".git").exists():
            break
    return None


def accept(results: Path, name: str, *, allow: Collection[str] = (), replace: bool = False) -> Path:
    """Write baselines/NAME from a results folder and return its path.

    Records of conformance and of fake worlds are left out, because their tests fail without a baseline. Raises
    `InputError` for an invalid name or one that is taken, and for wrong cases, imprecise rates, unfinished tests or
    damaged lines unless `allow` permits them. The folder stays unchanged if anything is refused.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"--name {name!r}: expected letters, digits, '.', '_' or '-', such as a100-8gpu")
    folder = Path(FOLDER) / name
    if folder.is_symlink():
        raise InputError(f"{str(folder)!r} is a link: remove it, or choose another name")
    if folder.exists() and not (replace and (folder / ABOUT).exists()):
        raise InputError(f"{str(folder)!r} is there already: choose another name, or give --replace for a baseline")
    reading = read_records(results)
    complain(results, reading.complaints)
    last, others = of_last_code(reading.records)
    if others:
        print(f"meshmark: {results}: {left_out(last, others)}", file=sys.stderr)
    matrix = [r for r in last if not r.conformance.scenario and r.task is not Task.FAKE_WORLD]
    records = [r for r in matrix if r.outcome.status is not Status.SKIPPED]
    if not records:
        raise ResultsError(f"{str(results)!r} holds no record of a real world; run `pytest suites` first")
    _refuse("wrong", _wrong(records), allow, "mend them, and run into an empty folder")
    _refuse("noisy", _noisy(records), allow, "use a quieter machine or a longer --timing-budget")
    _refuse("unfinished", _unfinished(reading), allow, "let the run end, or repeat it with --resume")
    _refuse("unfinished", damaged_lines(reading), allow, "delete these lines if a later run has repeated their cases")
    _write(folder, records, reading)
    return folder


def _refuse(kind: str, found: Sequence[str], allow: Collection[str], mend: str) -> None:
    if found and kind not in allow:
        found = list(dict.fromkeys(found))
        shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        raise InputError(f"no baseline of {kind} cases: {shown}: {mend}, or accept them with --allow {kind}")


def _wrong(records: Iterable[Record]) -> list[str]:
    found = list[str]()
    for record in records:
        if record.outcome.status is not Status.OK:
            found.append(f"{record.case.id}: {record.outcome.status}")
        found += [f"{record.case.id}: {v.suite}: {v.summary}" for v in record.verdicts if not v.passed]
    return found


def _noisy(records: Iterable[Record]) -> list[str]:
    timed = [r for r in records if r.task is Task.TIME and r.outcome.status is Status.OK]
    rates = [(record.case.id, throughput(record).relative) for record in timed]
    return [f"{case}: ±{relative:.0%}" for case, relative in rates if relative > NOISY]


def _unfinished(reading: Reading) -> list[str]:
    """Return tests that a run has not finished, or that failed in cases without a record. A gate would not notice that
    their cases are missing.
    """
    recorded, found = {record.case.id for record in reading.records}, list[str]()
    for attempt, _ in latest_attempts(reading.sessions, conforming=False):
        file, of_pytest, _ = attempt.test.partition("::")  # a gate's own attempts are of cases that may be gone
        if attempt.ending is Ending.UNFINISHED:
            found.append(f"{attempt.case}: {PurePath(file).stem} has not ended")
        elif attempt.ending is Ending.FAILED and of_pytest and attempt.case not in recorded:
            found.append(f"{attempt.case}: {PurePath(file).stem} failed, and there is no record of it")
    return found


def _write(folder: Path, records: Sequence[Record], reading: Reading) -> None:
    """Write the baseline to a temporary folder first, so that a failed write changes nothing.

    In a baseline that is replaced, only the baseline's own files are replaced, one by one. Other files of the user
    stay, and every file is complete at any time.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A new name, in a folder that nobody else can write to: one that can be guessed may be somebody's link.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as private:
        beside = Path(private) / folder.name
        with contextlib.closing(RecordFile(beside)) as file:
            for record in records:
                file.append(compact(record))
        (beside / ABOUT).write_text(json.dumps(about(folder.name, records, reading), indent=2) + "\n")
        shutil.rmtree(beside / "evidence", ignore_errors=True)
        if not folder.exists():
            beside.rename(folder)
            return
        for made in beside.iterdir():
            made.replace(folder / made.name)


def compact(record: Record) -> Record:
    """Return the record with verdicts and numbers, but without per-tensor evidence and logs."""
    found, timing = record.equivalence, record.timing
    return dataclasses.replace(
        record,
        outcome=Outcome(status=record.outcome.status, rank=record.outcome.rank, message=record.outcome.message),
        equivalence=EquivalenceEvidence(diagnosis=found.diagnosis, num_replicated=found.num_replicated),
        timing=TimingEvidence(
            rank_step_seconds=_rounded(timing.rank_step_seconds),
            rank_starts=_rounded(timing.rank_starts),
            lap_steps=timing.lap_steps,
            rank_cpu_seconds=_rounded(timing.rank_cpu_seconds),
            peak_flops_per_second=timing.peak_flops_per_second,
            relaunches=[
                Relaunch(
                    rank_step_seconds=_rounded(one.rank_step_seconds),
                    rank_starts=_rounded(one.rank_starts),
                    rank_cpu_seconds=_rounded(one.rank_cpu_seconds),
                )
                for one in timing.relaunches
            ],
        ),
    )


def _rounded(by_rank: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(seconds, _SECONDS_DIGITS) for seconds in rank] for rank in by_rank]


def about(name: str, records: Sequence[Record], reading: Reading) -> dict[str, object]:
    """Return a summary for people who open the folder."""
    told: dict[str, set[str]] = {}
    for record in records:
        for condition, value in conditions(record).items():
            if value:
                told.setdefault(condition, set()).add(value)
    return {
        "baseline": name,
        "cases": len({record.case.id for record in records}),
        "records": len(records),
        "dates": sorted({record.environment.date[:10] for record in records}),
        "commits": sorted({record.environment.commit for record in records if record.environment.commit}),
        "conditions": {condition: sorted(values) for condition, values in told.items()},
        "commands": sorted({session.command for session in reading.sessions}),
    }
