"""Records of cases that no ranks train: verdicts on an engine that generates, or on a compressed model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from meshmark.errors import ResultsError
from meshmark.records.record_file import complaint, json_of, open_lines, shared_file
from meshmark.serial import decode


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
        """Append the record to `folder`/records.jsonl, and return once it is on disk.

        Raises `ResultsError` if it does not get there. What the file held before is kept.
        """
        with shared_file(folder) as file:
            file.append_line(self.line().encode())


def expect_writable(folder: Path) -> None:
    """Raise `ResultsError` if no record can be appended in `folder`: before the work that a record is of, not after."""
    with shared_file(folder):
        pass


def num_judged(path: Path, key: str) -> int:
    """Return how many lines of a file are records of judged cases: of engines ("engine"), or of methods ("method")."""
    with path.open(errors="replace") as file:
        return sum(line.startswith(f'{{"case": {{"{key}": ') and '"verdicts": [' in line for line in file)


Judged = TypeVar("Judged", bound=JudgedCase)


def read_newest(
    path: Path,
    kind: type[Judged],
    complaints: list[str] | None = None,
    change: Callable[[Judged], Judged] | None = None,
) -> list[Judged]:
    """Return each case's last record in a file, in the order of the cases' first ones.

    Other records in the file, such as of training, are left out.

    Args:
        path: The file.
        kind: The class of its records.
        complaints: Complaints about lines that cannot be read are added to it, and the other lines are good. Without
            it, such a line raises `ResultsError`.
        change: Function that changes each record.
    """
    found, unread = dict[str, Judged](), list[str]()
    with open_lines(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                if record := _parse(line, kind):
                    found[json.dumps(record.case)] = change(record) if change else record
            except Exception as error:  # whatever a line holds, the others are kept
                unread.append(complaint(path, number, error))
    if complaints is not None:
        complaints += unread
    elif unread:
        raise ResultsError(f"{str(path)!r} holds lines that cannot be read: {'; '.join(unread[:3])}")
    return list(found.values())


def _parse(line: bytes, kind: type[Judged]) -> Judged | None:
    """Return the record in a line; None if the line is empty, or for readers of other records."""
    if not line.strip():
        return None
    value = json_of(line)
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80}: expected a record")
    if "schema" in value:
        return None
    record: Judged = decode(kind, value)
    return record
