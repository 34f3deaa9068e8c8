"""Records of cases that no ranks train: verdicts on an engine that generates, or on a compressed model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CaseVerdict:
    """One thing that was judged."""

    name: str
    passed: bool
    text: str
    numbers: dict[str, float] = field(default_factory=dict)
    gap: str = ""
    """Reproducer of the known gap that covers it. With `passed`, the gap no longer shows."""

    @property
    def fails(self) -> bool:
        """Whether it fails, and not as the adapter declares."""
        return not self.passed and not self.gap


@dataclass(frozen=True, kw_only=True)
class JudgedCase:
    """Results for one case: one line of records.jsonl."""

    case: dict[str, str]
    verdicts: list[CaseVerdict]
    speed: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    machine: str = ""
    date: str = ""

    @property
    def passed(self) -> bool:
        """True if no verdict fails."""
        return not any(verdict.fails for verdict in self.verdicts)

    def line(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    def append_to(self, folder: Path) -> None:
        """Append the record to `folder`/records.jsonl."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "records.jsonl").open("a") as file:
            file.write(self.line())


OTHER_RECORD = "a record of an engine that generates, or of a model made smaller"
"""Message of readers of other records about such a line."""


def num_judged(path: Path, key: str) -> int:
    """Return how many lines of a file are records of judged cases: of engines ("engine"), or of methods ("method")."""
    with path.open(errors="replace") as file:
        return sum(line.startswith(f'{{"case": {{"{key}": ') and '"verdicts": [' in line for line in file)


def newest_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of each case's last record in a file, in the order of the cases' first ones.

    Other records in the file, such as of training, are left out.
    """
    found = {}
    for line in path.read_text().splitlines():
        if "verdicts" not in (values := json.loads(line)) or "schema" in values:
            continue
        values["verdicts"] = [CaseVerdict(**verdict) for verdict in values["verdicts"]]
        found[json.dumps(values["case"])] = values
    yield from found.values()
