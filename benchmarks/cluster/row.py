"""What was tried and what became of it: a line of reports/cluster.md."""

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
    """Of what had been recorded before the fault; empty where nothing could be."""
    wrong: list[str] = field(default_factory=list)
    """What should not have been."""
    commit: str = ""
    """Of the checkout that it was tried in."""
    date: str = ""
    """When, UTC; empty in older rows."""


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
