"""Read and write DIR/records.jsonl: records and sessions, one line of JSON each."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import hashlib
import json
import marshal
import os
import secrets
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshmark.environment import Environment
from meshmark.errors import ResultsError, refuse_device
from meshmark.records.evidence import EvidenceFolder, leave_behind, open_lines
from meshmark.records.migration import migrate
from meshmark.records.record import (
    ConformanceEvidence,
    MemoryEvidence,
    Outcome,
    Record,
    TimingEvidence,
    TrafficEvidence,
    validate_record,
)
from meshmark.records.session import Session
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.text import clip, describe_error

CUT_OFF = "a run was cut off there"
"""Text of a complaint about a torn line."""
_COMPLAINT_CHARACTERS = 500
_SHARED: dict[str, type] = {
    "case": Case,
    "environment": Environment,
    "outcome": Outcome,
    "memory": MemoryEvidence,
    "traffic": TrafficEvidence,
    "timing": TimingEvidence,
    "conformance": ConformanceEvidence,
}
"""Parts of a record for which equal values are read as one shared object."""


def line_of(record: Record | Session, evidence: EvidenceFolder | None = None) -> bytes:
    """Return the record's line of the file. Bulky parts are moved to `evidence`, if given.

    The line is parsed once as a check. Raises `ValueError`, `KeyError` or `TypeError` if no reader could parse it, for
    example because an adapter reported an invalid value.
    """
    value = encode(record)
    _parse(json.dumps(value).encode())
    if evidence:
        evidence.put_aside(value)
    return json.dumps(value).encode() + b"\n"


class RecordFile:
    """Appends records and sessions to DIR/records.jsonl, one per line.

    Each record is on disk before the next case starts. A line is written only after the evidence that it names.
    """

    def __init__(self, folder: Path) -> None:
        """Raise `ResultsError` if the folder is not writable or another run uses it."""
        self.path = folder.absolute() / "records.jsonl"  # the working directory may be another by the last record
        self._evidence = EvidenceFolder(self.path.parent)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a line that failed to be written must not appear later, after other lines.
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ResultsError(
                f"results folder {str(folder)!r}: {error.strerror}; name another with --results"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            in_use = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            why = "is in use by another run" if in_use else f"is on a file system without locks ({error.strerror})"
            raise ResultsError(f"results folder {str(folder)!r} {why}; name another with --results") from error
        try:
            self._end_last_line()
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from error

    def _end_last_line(self) -> None:
        """End a line that an earlier run left unfinished, so that it does not swallow the next one."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record: Record | Session) -> None:
        """Append one line.

        Raises `ResultsError` if the line does not reach the disk or the file is no longer at `path`, and the errors of
        `line_of`.
        """
        line, end = line_of(record, self._evidence), os.fstat(self._file.fileno()).st_size
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
        """Raise `ResultsError` if the open file is no longer the one at its path, where records would be lost."""
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
        """Save the content of a removed file and return where: next to its path, or among temporary files."""
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
        """Close the file. Raises `ResultsError` if it is no longer at its path."""
        if self._file.closed:  # it has been said
            return
        with self._file:
            self._expect_in_place()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The content of a results folder."""

    records: list[Record]
    complaints: list[str]
    """One complaint per unreadable line. The other lines are good."""
    sessions: list[Session] = field(default_factory=list)


def read_records(folder: Path, *, latest: bool = False) -> Reading:
    """Read every good line of DIR/records.jsonl, or of a file, with a complaint for each bad one.

    A file may be packed (`.jsonl.gz`).

    `latest` keeps only the last of several records of one pass over one case on one device, which is all that a report
    shows; the same applies to sessions.

    Raises `ResultsError` when there is no such file, or no good line in it.
    """
    path = folder / "records.jsonl" if folder.is_dir() else folder
    records, sessions, complaints = dict[object, Record](), dict[object, Session](), list[str]()
    shared, offset = _Shared(), 0
    refuse_device(path)
    try:
        with open_lines(path) as file, _without_collections():
            for number, line in enumerate(file, start=1):
                try:
                    parsed = _parse(line, (path, offset), shared) if line.strip() else None
                except Exception as error:  # whatever a line holds, the others are kept
                    complaints.append(f"{path.name} line {number}: {_reason(error)}")
                    parsed = None
                if isinstance(parsed, Record):
                    records[_pass_of(parsed) if latest else number] = parsed
                elif parsed:
                    sessions[parsed.session if latest else number] = parsed
                offset += len(line)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or describe_error(error)
        raise ResultsError(f"no records at {str(path)!r}: {why}; run `pytest suites --results DIR` first") from error
    if not records and not sessions:
        raise ResultsError(
            f"{str(path)!r} holds no record that can be read: {'; '.join(complaints[:3]) or 'it is empty'}"
        )
    if latest:
        gc.freeze()  # what a report has read stays until its end, and nobody need look through it again
    return Reading(records=list(records.values()), complaints=complaints, sessions=list(sessions.values()))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection while reading.

    Records have no reference cycles. Repeated collections over all records read so far would take a third of the time
    of reading thousands.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Shared:
    """Cache that shares equal parts between records.

    A case has several records. Keys are hashes of exact bytes. Even a hundred thousand cases that differ only in their
    seeds or names have few distinct parts.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[type, bytes], Any] = {}

    def __call__(self, kind: type, value: Any) -> Any:  # noqa: ANN401
        form = marshal.dumps(value, 2)  # later forms depend on who else holds its parts
        key = kind, hashlib.blake2b(form, digest_size=16).digest()
        if key not in self._read:
            if kind is ConformanceEvidence and isinstance(value, dict) and value.get("base"):
                value |= {"base": self(Case, value["base"])}
            self._read[key] = decode(kind, value)
        return self._read[key]


def _pass_of(record: Record) -> tuple[object, ...]:
    """Return a key that identifies the pass of a record within one reading, where equal cases are one object."""
    about = record.conformance
    return id(record.case), id(about.base), about.scenario, record.task, record.environment.device


def _reason(error: Exception) -> str:
    sentence = isinstance(error, ValueError | TypeError)
    return clip(str(error) if sentence else describe_error(error), _COMPLAINT_CHARACTERS)


def _parse(line: bytes, place: tuple[Path, int] | None = None, shared: _Shared | None = None) -> Record | Session:
    """Parse a line. With its `place` (file and offset of the line), bulky parts are loaded on use."""
    try:
        value = json.loads(line.decode(errors="replace"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not whole JSON ({error.msg} at character {error.pos}); {CUT_OFF}") from error
    value = migrate(value)
    if "session" in value:
        session: Session = decode(Session, value)
        return session
    if place:
        leave_behind(value, *place)
    if shared:
        value |= {name: shared(kind, value[name]) for name, kind in _SHARED.items() if name in value}
    record: Record = decode(Record, value)
    if place:
        validate_record(record)
    return record


# --- Merging the records of several runs into one folder.


def merge(folders: Iterable[Path], into: Path) -> Reading:
    """Append to `into` the lines of `folders` that it does not have yet, in order.

    Folders without readable records are skipped with a complaint. Returns what `into` then holds. Raises
    `ResultsError` if it cannot be written, or holds nothing.
    """
    complaints, held = list[str](), set[object]()
    with contextlib.suppress(ResultsError):
        there = read_records(into)
        held = {*map(_name, there.sessions), *map(_name, there.records)}
    with contextlib.closing(RecordFile(into)) as file:
        for folder in folders:
            try:
                reading = read_records(folder)
            except ResultsError as error:
                complaints.append(str(error))
                continue
            complaints += [f"{folder.name}: {complaint}" for complaint in reading.complaints]
            lines: list[Record | Session] = [*reading.sessions, *reading.records]
            for line in lines:
                if (name := _name(line)) not in held:
                    file.append(line)
                    held.add(name)
    merged = read_records(into)
    return Reading(records=merged.records, complaints=[*complaints, *merged.complaints], sessions=merged.sessions)


def _name(line: Record | Session) -> object:
    """Return a key that no other line has."""
    if isinstance(line, Session):
        return line.session, line.exit_code
    about = line.conformance
    return line.task, line.case, about.base, about.scenario, line.environment.date, line.launch.seconds
