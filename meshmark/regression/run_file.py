"""What a history needs of a results folder, and no more: a thousand of them are read in a minute."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmark.errors import ResultsError, refuse_device
from meshmark.records.migration import migrate
from meshmark.records.request import Task
from meshmark.regression.conditions import READERS
from meshmark.serial import decode
from meshmark.spec.case import Case

TIMES = ("seconds a step", "launch seconds", "build seconds")
PEAK, SENT, CORRECT = "peak bytes", "bytes sent", "correct"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One results folder."""

    name: str
    date: str
    """Of the run."""
    commit: str
    """Of the user's own repository, else of Meshmark's checkout."""
    machine: str
    versions: Mapping[str, str]
    values: Mapping[str, Mapping[str, float]]
    """By case and metric; of several records of one pass the last."""
    commit_date: str = ""
    """When the commit of the user's repository was made; empty where none is known."""

    @property
    def when(self) -> tuple[str, str]:
        """By which runs are ordered: an old commit that is measured today stands in its own place."""
        return self.commit_date or self.date, self.date


def read_run(path: Path) -> Run:
    """Lines that cannot be read are passed over. Raises `ResultsError` where none can."""
    file = path / "records.jsonl" if path.is_dir() else path
    values: dict[str, dict[str, float]] = {}
    about: dict[str, Any] = {}
    refuse_device(file)
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ResultsError(f"no records at {str(file)!r}: {error.strerror}; expected a results folder") from error
    for line in lines:
        try:
            record = migrate(json.loads(line))
            if "session" in record or record["conformance"].get("scenario"):
                continue
            found = {metric: value for metric, value in _values(record).items() if _drawable(metric, value)}
            case, told = _case_id(record["case"]), _about(record["environment"])
            values.setdefault(case, {}).update(found)
            about = told
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
    if not about:
        raise ResultsError(f"{str(file)!r} holds no record of a case that this Meshmark can read")
    return Run(name=str(path), values=values, **about)


def _about(environment: Mapping[str, Any]) -> dict[str, Any]:
    """As texts, whatever a record of a stranger's holds in their place."""
    versions = {name: str(told) for name, told in environment["versions"].items() if name not in READERS}
    found = {name: str(environment[name]) for name in ("date", "commit", "machine")} | {"versions": versions}
    if own := str(environment.get("project_commit", "")):
        found["commit"] = own
    return found | {"commit_date": str(environment.get("project_date", ""))}


def _drawable(metric: str, value: float) -> bool:
    """Times are compared by their logarithms."""
    return abs(value) < _LARGEST and (value > 0 or metric not in TIMES)


_LARGEST = 2**63
_ids: dict[str, str] = {}
"""By a case as it is written: a history holds few, many times."""


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
    """As `TimingEvidence.step_seconds` has it: laps last from the first rank's start to the last one's end."""
    took = _lap_seconds(timing) + sum(_lap_seconds(again) for again in timing.get("relaunches", ()))
    return took / (len(timing["rank_step_seconds"][0]) * (1 + len(timing.get("relaunches", ()))))


def _lap_seconds(timing: Mapping[str, Any]) -> float:
    """Of all laps of one launch."""
    ranks: list[list[float]] = timing["rank_step_seconds"]
    counts: list[int] = timing.get("lap_steps") or [len(ranks[0])]
    starts: list[list[float]] = timing.get("rank_starts") or [[0.0] * len(counts)] * len(ranks)
    borders = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return sum(
        max(start[lap] + sum(own[begin:end]) for own, start in zip(ranks, starts, strict=True))
        for lap, (begin, end) in enumerate(borders)
    )
