"""One trial and its outcome: a line of reports/cluster.md."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from meshmark.serial import decode, encode


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial."""

    engine: str
    """Who started the processes."""
    shape: str
    """Nodes x tasks a node x ranks a task, and where."""
    fault: str = "none"
    seconds: float | None = None
    """From the fault until it was noticed; of a run without one, what it took."""
    told: str = ""
    lost: str = ""
    """Part of the earlier records that was lost; empty if nothing could be lost."""
    wrong: list[str] = field(default_factory=list)
    """Complaints about the trial."""
    commit: str = ""
    """Commit of the checkout that the trial ran in."""
    date: str = ""
    """When, UTC; empty in older rows."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run of all trials, one after the other, from no row."""

    seconds: float
    trials: int
    commit: str
    end: str
    """When, UTC: rows of a later date, or another commit, were made in pieces."""


def begin(file: Path) -> None:
    """Nothing is known of any trial from here on."""
    for each in (file, _of_whole(file)):
        each.unlink(missing_ok=True)


def finish(whole: Whole, file: Path) -> None:
    """All rows that are kept are of `whole`."""
    _of_whole(file).write_text(json.dumps(encode(whole)))


def whole_of(file: Path) -> Whole | None:
    """None where no run of all trials came to its end."""
    own = _of_whole(file)
    whole: Whole | None = decode(Whole, json.loads(own.read_text())) if own.is_file() else None
    return whole


def _of_whole(file: Path) -> Path:
    return file.with_name("whole.json")


def keep(row: Row, file: Path) -> None:
    """With the rows of earlier runs, which it replaces one of: trials take long, and a page may be made in pieces."""
    rows = {(r.engine, r.shape, r.fault): r for r in [*kept(file), row]}
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_suffix(".new")
    own.write_text(json.dumps(encode(list(rows.values())), indent=1))
    own.replace(file)


def kept(file: Path) -> list[Row]:
    """Rows of all runs."""
    rows: list[Row] = decode(list[Row], json.loads(file.read_text())) if file.is_file() else []
    return rows
