"""DIR/records.jsonl: records and sessions, one a line of JSON; written whole, and read line by line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from meshmark.errors import ResultsError
from meshmark.run.migration import migrate
from meshmark.run.record import Record
from meshmark.run.session import Session
from meshmark.serial import decode, encode


class RecordFile:
    """Appends records to DIR/records.jsonl, one a line, each on disk before the next case starts; and sessions."""

    def __init__(self, folder: Path) -> None:
        """Raises `ResultsError` when the folder cannot be written or another run has it."""
        self.path = folder / "records.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(self.path, "ab+")  # noqa: SIM115
        except OSError as error:
            raise ResultsError(
                f"results folder {str(folder)!r}: {error.strerror}; name another with --results"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ResultsError(
                f"results folder {str(folder)!r} is in use by another run; name another with --results"
            ) from error
        self._end_last_line()

    def _end_last_line(self) -> None:
        """A line that an earlier run left unfinished must not swallow ours."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record: Record | Session) -> None:
        """Raises `ResultsError` when the line does not reach the disk."""
        try:
            self._file.write(json.dumps(encode(record)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ResultsError(
                f"{str(self.path)!r} cannot be written: {error.strerror}; what it held before is kept"
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that `append` has already complained about
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a results folder holds."""

    records: list[Record]
    complaints: list[str]
    """One for every line that could not be read; the others are good."""
    sessions: list[Session] = field(default_factory=list)


def read_records(folder: Path) -> Reading:
    """Every good line of DIR/records.jsonl, and a complaint for each bad one.

    Raises `ResultsError` when there is no such file, or not one good line in it.
    """
    path = folder / "records.jsonl" if folder.is_dir() else folder
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise ResultsError(
            f"no records at {str(path)!r}: {error.strerror}; run `pytest suites --results DIR` first"
        ) from error
    records, sessions, complaints = list[Record](), list[Session](), list[str]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = _parse(line)
            records += [parsed] if isinstance(parsed, Record) else []
            sessions += [parsed] if isinstance(parsed, Session) else []
        except (ValueError, KeyError, TypeError) as error:
            complaints.append(f"{path.name} line {number}: {error}")
    if not records and not sessions:
        raise ResultsError(
            f"{str(path)!r} holds no record that can be read: {'; '.join(complaints[:3]) or 'it is empty'}"
        )
    return Reading(records=records, complaints=complaints, sessions=sessions)


def _parse(line: str) -> Record | Session:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not whole JSON ({error.msg} at character {error.pos}); a run was cut off there") from error
    value = migrate(value)
    parsed: Record | Session = decode(Session if "session" in value else Record, value)
    return parsed
