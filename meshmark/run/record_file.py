"""DIR/records.jsonl: records and sessions, one a line of JSON; written whole, and read line by line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.run.migration import migrate
from meshmark.run.record import Record
from meshmark.run.session import Session
from meshmark.serial import decode, encode


def line_of(record: Record | Session) -> bytes:
    """Its line of the file, which a reader was seen to take.

    Raises `ValueError`, `KeyError` or `TypeError` for one that none would take, such as one that holds what an adapter
    should not have told.
    """
    line = json.dumps(encode(record))
    _parse(line)
    return line.encode() + b"\n"


class RecordFile:
    """Appends records to DIR/records.jsonl, one a line, each on disk before the next case starts; and sessions."""

    def __init__(self, folder: Path) -> None:
        """Raises `ResultsError` when the folder cannot be written or another run has it."""
        self.path = folder.absolute() / "records.jsonl"  # the working directory may be another by the last record
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what failed to be written once must not be written later, behind other lines.
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
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
        try:
            self._end_last_line()
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from error

    def _end_last_line(self) -> None:
        """A line that an earlier run left unfinished must not swallow ours."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record: Record | Session) -> None:
        """Raises `ResultsError` when the line does not reach the disk, or not the file at `path`; and as `line_of`."""
        line, end = line_of(record), os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)  # half a line is none
            raise self._unwritable(error) from error
        self._expect_in_place()

    def _unwritable(self, error: OSError) -> ResultsError:
        return ResultsError(f"{str(self.path)!r} cannot be written: {error.strerror}; what it held before is kept")

    def _expect_in_place(self) -> None:
        """Raises `ResultsError` when this file is no longer the one at its path: nobody would find its records."""
        mine = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path)
        except OSError:
            there = None
        if there and (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            return
        found = os.readlink(f"/proc/self/fd/{self._file.fileno()}") if mine.st_nlink else self._rescue()
        self._file.close()
        raise ResultsError(
            f"{str(self.path)!r} was {'replaced' if there else 'moved or removed'} while this run was writing to it; "
            f"all that it has recorded is in {found!r}"
        )

    def _rescue(self) -> str:
        """Where the content of a file that was removed is now: beside its path, or among temporary files."""
        self._file.seek(0)
        content = self._file.read()
        for folder in (self.path.parent, Path(tempfile.gettempdir())):
            rescued = folder / f"records-{secrets.token_hex(4)}.jsonl"
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                rescued.write_bytes(content)
                return str(rescued)
        return "no file, for none can be written"

    def close(self) -> None:
        """Raises `ResultsError` when the file is not where its records are looked for."""
        if self._file.closed:  # it has been said
            return
        with self._file:
            self._expect_in_place()


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
