"""Read only what a history needs from a results folder. A thousand folders take a minute."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmark.errors import ResultsError
from meshmark.records.record_file import complaint, is_other_record, json_of, migrate, open_lines, records_path
from meshmark.records.request import Task
from meshmark.regression.conditions import READERS
from meshmark.serial import decode
from meshmark.spec.case import Case
from meshmark.text import describe_error, pluralize

TIMES = ("seconds a step", "launch seconds", "build seconds")
PEAK, SENT, CORRECT = "peak bytes", "bytes sent", "correct"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One results folder."""

    name: str
    date: str
    """Date of the run."""
    commit: str
    """Commit of the user's own repository, or of Meshmark's checkout."""
    machine: str
    versions: Mapping[str, str]
    values: Mapping[str, Mapping[str, float]]
    """Values by case and metric. The last of several records of one pass counts."""
    commit_date: str = ""
    """Date of the commit of the user's repository. Empty if unknown."""
    left_out: str = ""
    """What the folder holds that cannot be read, in words. Empty if there is nothing."""

    @property
    def when(self) -> tuple[str, str]:
        """Sort key of runs: by commit date, so that an old commit that is measured today keeps its place."""
        return self.commit_date or self.date, self.date


def read_run(path: Path) -> Run:
    """Read a run and skip unreadable lines. Raises `ResultsError` if no line is readable."""
    file = records_path(path)
    values: dict[str, dict[str, float]] = {}
    about: dict[str, Any] = {}
    num_unread, first = 0, ""
    try:
        with open_lines(file) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if record := _record_of(line):
                        found = {metric: value for metric, value in _values(record).items() if _drawable(metric, value)}
                        case, told = _case_id(record["case"]), _about(record["environment"])
                        values.setdefault(case, {}).update(found)
                        about = told
                except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                    num_unread, first = num_unread + 1, first or complaint(file, number, error)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or describe_error(error)
        raise ResultsError(f"no records at {str(file)!r}: {why}; expected a results folder") from error
    if not about:
        raise ResultsError(f"{str(file)!r} holds no record of a case that this Meshmark can read")
    left_out = f"{pluralize(num_unread, 'line')} that cannot be read, first {first}" if num_unread else ""
    return Run(name=str(path), values=values, left_out=left_out, **about)


def _record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None for a line that no history is of, such as a record of an engine."""
    if not line.strip() or is_other_record(value := json_of(line)):
        return None
    record = migrate(value)
    return None if "session" in record or record["conformance"].get("scenario") else record


def _about(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment values as text, whatever types a foreign record has."""
    versions = {name: str(told) for name, told in environment["versions"].items() if name not in READERS}
    found = {name: str(environment[name]) for name in ("date", "commit", "machine")} | {"versions": versions}
    if own := str(environment.get("project_commit", "")):
        found["commit"] = own
    return found | {"commit_date": str(environment.get("project_date", ""))}


def _drawable(metric: str, value: float) -> bool:
    """Return whether a value can be plotted. Times must be positive, because they are compared by logarithms."""
    return abs(value) < _LARGEST and (value > 0 or metric not in TIMES)


_LARGEST = 2**63
_ids: dict[str, str] = {}
"""Case ids by encoded case. A history repeats few cases many times."""


def _case_id(value: object) -> str:
    key = json.dumps(value)
    if key not in _ids:
        case: Case = decode(Case, value)
        _ids[key] = case.id
    return _ids[key]


def _values(record: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    if record["outcome"]["status"] != "ok":
        return {CORRECT: 0.0} if record["task"] == Task.OBSERVE else {}
    if record["task"] == Task.TIME:
        return {TIMES[0]: _mean_step(record["timing"])} if record["timing"]["rank_step_seconds"] else {}
    if record["task"] != Task.OBSERVE:
        return {}
    for metric, name in ((TIMES[1], "seconds"), (TIMES[2], "build_seconds")):
        if record["launch"].get(name):
            found[metric] = record["launch"][name]
    for verdict in record["verdicts"]:
        if verdict["suite"] == "equivalence" and not verdict.get("undecided"):
            found[CORRECT] = float(verdict["passed"])
    if readings := record["memory"]["readings"]:
        found[PEAK] = max(sum(reading["peak"].values()) for reading in readings)
    if sent := record["traffic"]["readings"]:
        found[SENT] = sum(each["num_bytes"] for reading in sent for each in reading["asked"])
    return found


def _mean_step(timing: Mapping[str, Any]) -> float:
    """Return the mean step time, as in `TimingEvidence.step_seconds`: laps run from the first start to the last
    end.
    """
    took = _lap_seconds(timing) + sum(_lap_seconds(again) for again in timing.get("relaunches", ()))
    return took / (len(timing["rank_step_seconds"][0]) * (1 + len(timing.get("relaunches", ()))))


def _lap_seconds(timing: Mapping[str, Any]) -> float:
    """Return the seconds of all laps of one launch."""
    ranks: list[list[float]] = timing["rank_step_seconds"]
    counts: list[int] = timing.get("lap_steps") or [len(ranks[0])]
    starts: list[list[float]] = timing.get("rank_starts") or [[0.0] * len(counts)] * len(ranks)
    borders = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return sum(
        max(start[lap] + sum(own[begin:end]) for own, start in zip(ranks, starts, strict=True))
        for lap, (begin, end) in enumerate(borders)
    )
