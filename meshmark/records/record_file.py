"""Read and write DIR/records.jsonl: records and sessions, one line of JSON each.

A session says what was asked for and how each test ended, including tests without a record. Lines of older schemas are
converted to the current one.

Bulky evidence is in compressed files next to the records, named by content and read on demand. The deviation of every
tensor from the truth at every step, and the noise of rounding alone, make up nine tenths of a record. Verdicts were
computed from this evidence, but a table of verdicts needs none of it. The noise of a workload is the same in all its
records, and is therefore one file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import gzip
import hashlib
import json
import marshal
import os
import re
import secrets
import stat
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, TypeVar

from meshmark.environment import Environment
from meshmark.errors import EvidenceError, ResultsError, refuse_device, refuse_pipe
from meshmark.judge.deviation import Deviations
from meshmark.judge.tolerance_model import Comparisons
from meshmark.models.config import with_kind
from meshmark.records.record import (
    SCHEMA,
    ConformanceEvidence,
    MemoryEvidence,
    Outcome,
    Record,
    TimingEvidence,
    TrafficEvidence,
    decisive,
    validate_record,
    was_wrong,
)
from meshmark.serial import decode, encode
from meshmark.spec.algorithm import without_foreign_options
from meshmark.spec.case import Case
from meshmark.text import clip, describe_error

# --- Sessions of pytest: what was asked for, and how each test ended, including tests without a record.


class Ending(StrEnum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNFINISHED = "unfinished"
    """Not run to its end, because the session ended before."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One test of a session."""

    test: str
    """Node id in pytest."""
    case: str
    """Id of its case, or of the case that its conformance scenarios vary."""
    conforming: bool
    """True if the test belongs to the conformance suite."""
    ending: Ending = Ending.UNFINISHED
    message: str = ""
    """Message of a failed test."""
    command: str = ""
    """Command that runs a failed test again, alone."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run of pytest over cases. Its line is written when it begins, and again, complete, when it ends."""

    schema: int
    session: str
    """Name of the session. Both of its lines have it, and no other session."""
    command: str
    device: str
    corpus: str | None = None
    exit_code: int | None = None
    """Exit code of pytest, or None until it has ended."""
    attempts: list[Attempt] = field(default_factory=list)
    code: str = ""
    """Commits of Meshmark and of the user's repository around the working directory. Empty in older records."""


def by_defect(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Group failed attempts by defect.

    Failures of one case with the same first line belong together, such as all suites of a pass that crashed.
    """
    found: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        if attempt.ending is Ending.FAILED:
            found.setdefault((attempt.case, attempt.message.partition("\n")[0]), []).append(attempt)
    return list(found.values())


def latest_attempts(sessions: Iterable[Session], *, conforming: bool) -> list[tuple[Attempt, Session]]:
    """Return the latest attempt of each test, with its session.

    An unfinished attempt counts only if no session of the same code finished the test.
    """
    found: dict[tuple[str, str, str | None], tuple[Attempt, Session]] = {}
    for session in {each.session: each for each in sessions}.values():
        for attempt in session.attempts:
            key = attempt.test, session.device, session.corpus
            ended = attempt.ending is not Ending.UNFINISHED
            if attempt.conforming is conforming and (ended or key not in found or found[key][1].code != session.code):
                found[key] = attempt, session
    return list(found.values())


# --- Convert lines of records files from older schemas to the current one.

_PARTS_OF_SCHEMA_1: dict[str, dict[str, str]] = {
    "launch": {"launch_seconds": "seconds", "build_seconds": "build_seconds"},
    "training": {"losses": "losses", "norms": "norms"},
    "equivalence": {
        "deviations": "deviations",
        "noise": "noise",
        "factors": "factors",
        "drifts": "drifts",
        "diagnosis": "diagnosis",
        "num_replicated": "num_replicated",
    },
    "memory": {
        "memory": "readings",
        "planned_states": "planned",
        "remainders": "remainders",
        "state_dtypes": "state_dtypes",
    },
    "traffic": {"traffic": "readings"},
    "timing": {"rank_step_seconds": "rank_step_seconds"},
    "conformance": {
        "scenario": "scenario",
        "base": "base",
        "samples": "samples",
        "digests": "digests",
        "known_gaps": "known_gaps",
    },
}
"""Fields of each part of a record: their flat names in schema 1, and their names within the part."""
_RENAMED_IN_SCHEMA_3 = {
    "memory": {"remainders": "extra_memory"},
    "traffic": {"departures": "traffic_exceptions"},
}
"""Fields of each part that had another name in schema 2."""
_SAME_AS_TODAY = 3
"""Records have had today's form since this schema. Schema 4 only adds the user's repository, files and processor
times.
"""
_LEFT_OUT = {"matmul_flops_per_second", "planned_traffic"}
"""Fields of schema 1 that are dropped.

Ranks that shared cores each reported a peak that the machine did not have as a whole. Adapters reported the traffic
they planned, which verdicts no longer use.
"""


OTHER_RECORD = "a record of an engine that generates, or of a model made smaller"
"""Message of readers of other records about such a line; see `judged_case`."""


def is_other_record(value: object) -> bool:
    """Return whether a line's JSON value is for readers of other records."""
    return isinstance(value, dict) and value.get("schema") is None and "verdicts" in value


def migrate(value: object) -> dict[str, Any]:
    """Return a line's JSON value, of this or an older schema, in the form of `SCHEMA`.

    Raises `ValueError` for an unknown schema.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if is_other_record(value):
        raise ValueError(f"{OTHER_RECORD}; `meshmark report DIR` reads it")
    if not isinstance(value, dict) or schema not in range(1, SCHEMA + 1):
        newer = "; a newer one wrote it: upgrade" if isinstance(schema, int) and schema > SCHEMA else ""
        raise ValueError(f"schema {schema}, this Meshmark reads 1 to {SCHEMA}{newer}")
    if schema in range(_SAME_AS_TODAY, SCHEMA + 1) or "session" in value:
        return value | {"schema": SCHEMA}
    if schema == 1:
        value = _to_schema_2(value)
    return _to_schema_3(value)


def _to_schema_2(value: dict[str, Any]) -> dict[str, Any]:
    """Group the fields of a record into the parts of schema 2."""
    moved = _LEFT_OUT.union(*_PARTS_OF_SCHEMA_1.values())
    parts = {
        name: {new: value[old] for old, new in part.items() if old in value}
        for name, part in _PARTS_OF_SCHEMA_1.items()
    }
    return {name: each for name, each in value.items() if name not in moved} | parts


def _to_schema_3(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record in the form of schema 3.

    Algorithms have only their own options, models have a kind, and fields have their new names.
    """
    found = value | {"schema": SCHEMA}
    for part, renamed in _RENAMED_IN_SCHEMA_3.items():
        if isinstance(held := value.get(part), dict):
            found[part] = {renamed.get(name, name): each for name, each in held.items()}
    if isinstance(case := value.get("case"), dict):
        found["case"] = _with_algorithm_options(case)
    conformance = value.get("conformance")
    if isinstance(conformance, dict) and isinstance(base := conformance.get("base"), dict):
        found["conformance"] = conformance | {"base": _with_algorithm_options(base)}
    return found


def _with_algorithm_options(case: dict[str, Any]) -> dict[str, Any]:
    workload = case.get("workload")
    if not isinstance(workload, dict):
        return case
    changed: dict[str, Any] = {}
    if isinstance(algorithm := workload.get("algorithm"), dict):
        changed["algorithm"] = without_foreign_options(algorithm)
    if isinstance(model := workload.get("model"), dict):
        changed["model"] = with_kind(model)
    return case | {"workload": workload | changed}


# --- Bulky evidence, in files next to the records.

FIELDS: dict[str, Any] = {"deviations": Deviations, "noise": Comparisons, "factors": Mapping[str, float]}
"""Fields of `EquivalenceEvidence` that may be stored in a separate file, and their types."""
SMALL = 4096
"""Size in characters up to which a field stays in the record's line."""
_FEW = 8
"""Number of quantities up to which a field inside a line is read together with it."""
LARGEST = 2**26
"""Largest size in bytes of evidence that is read. A compressed file from elsewhere may expand to any size.

All quantities of 3,000 tensors over 50 steps fit.
"""
LONGEST_LINE = 2**25
"""Largest size in bytes of a line that is read. Lines have some ten thousand, as evidence is beside them."""
MOST_UNPACKED = 2**29
"""Number of bytes of a packed file of records that are read."""
_LEAST_COUNTED = 512
"""Number of bytes that a shorter line counts as, because a complaint about it takes as much memory."""
_FEW_PARTS, _BYTES_A_PART = 2**18, 24
"""Number of lists and objects that any JSON text may have, and the bytes that each further one must be worth.

An empty object of two bytes takes a hundred in memory. A number of full precision alone has twenty.
"""
_NAME = re.compile(r"evidence/(?P<digest>[0-9a-f]{64})\.json\.gz")

K = TypeVar("K")
V = TypeVar("V", covariant=True)


class Stored(Mapping[K, V]):
    """A mapping that is loaded on first use. Raises `EvidenceError` if it cannot be loaded."""

    def __init__(self, load: Callable[[], Mapping[K, V]]) -> None:
        self._load = load

    def __getitem__(self, key: K) -> V:
        return self._load()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def __repr__(self) -> str:
        return f"Stored({self._load!r})"


class EvidenceFolder:
    """The evidence files of one results folder. Each piece of evidence is stored once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: set[str] = set()

    def put_aside(self, record: dict[str, Any]) -> None:
        """Move bulky fields of an encoded record to files and put the file names in their place.

        A field stays in the record if no file can be written.
        """
        evidence = record.get("equivalence", {})
        for name in FIELDS:
            text = json.dumps(evidence.get(name, {}))
            if len(text) > SMALL:
                with contextlib.suppress(OSError):
                    evidence[name] = self._put(text.encode())

    def _put(self, content: bytes) -> str:
        name = f"evidence/{hashlib.sha256(content).hexdigest()}.json.gz"
        if name not in self._kept and not _is_stored(self._folder / name, content):
            _write(self._folder / name, gzip.compress(content, mtime=0))
        self._kept.add(name)
        return name


def _is_stored(path: Path, content: bytes) -> bool:
    """Return whether an earlier run left a complete file with `content` at `path`."""
    try:
        return _content(path) == content
    except EvidenceError:
        return False


def records_path(given: Path) -> Path:
    """Return the file of records that a folder, or a file, stands for.

    Raises `InputError` if it is a device or, in a folder, a pipe, and `ResultsError` if nobody lets us look.
    """
    try:
        path = given / "records.jsonl" if given.is_dir() else given
    except OSError as error:
        raise ResultsError(f"{given}: {error.strerror}; name another with --results") from error
    refuse_device(path)
    if path is not given:
        refuse_pipe(path)
    return path


class LongLine(bytes):
    """Stands for a line of more than `LONGEST_LINE` bytes, which is not held in memory. `json_of` refuses it."""


class Lines:
    """The lines of a file of records, packed by gzip or not. What a file from elsewhere holds fills no memory.

    Raises `ResultsError` beyond `MOST_UNPACKED` bytes of a packed file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed = path.suffix == ".gz"
        self._file: IO[bytes] | gzip.GzipFile = gzip.open(path) if self._packed else path.open("rb")
        self.offset = 0
        """Offset of the line that was read last."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        end = counted = 0
        while line := self._file.readline(LONGEST_LINE + 1):
            self.offset, end = end, end + len(line)
            counted += max(len(line), _LEAST_COUNTED)
            self._expect_few(counted)
            if len(line) > LONGEST_LINE:
                is_whole = line.endswith(b"\n")
                line = LongLine(b"too long")
                while not is_whole and (rest := self._file.readline(_PIECE)):
                    is_whole, end, counted = rest.endswith(b"\n"), end + len(rest), counted + len(rest)
                    self._expect_few(counted)
            yield line

    def _expect_few(self, counted: int) -> None:
        if self._packed and counted > MOST_UNPACKED:
            raise ResultsError(
                f"{str(self._path)!r} unpacks to more than {MOST_UNPACKED >> 20} MiB, or to as many short lines; if it "
                "is yours, unpack it by gunzip, and name the unpacked file"
            )

    def at(self, offset: int) -> bytes:
        """Return the line at `offset`."""
        self._file.seek(offset)
        return self._file.readline(LONGEST_LINE)


_PIECE = 2**20


def open_lines(path: Path) -> Lines:
    """Open a file of records for reading, packed by gzip or not."""
    return Lines(path)


def _write(path: Path, packed: bytes) -> None:
    """Write a file atomically, and return once it is on disk."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def leave_behind(record: dict[str, Any], path: Path, offset: int) -> None:
    """Replace bulky fields of an encoded record by mappings that load on use.

    `path` and `offset` give the start of the record's line. Older records have the evidence in the line itself, which
    would fill the memory of a process that reads many records.

    Raises `ValueError` for a name that no evidence file can have.
    """
    evidence = record.get("equivalence")
    if not isinstance(evidence, dict):
        return
    for name in FIELDS:
        value = evidence.get(name)
        if isinstance(value, str):
            if not _NAME.fullmatch(value):
                raise ValueError(f"{name} are said to be in {value!r:.200}, expected evidence/SHA256.json.gz")
            evidence[name] = Stored(functools.partial(_of_file, path.parent / value, name))
        elif isinstance(value, dict) and len(value) > _FEW:
            evidence[name] = Stored(functools.partial(_of_line, path, offset, name))


class _Kept:
    """Cache of evidence that was used last, bounded by the size of its JSON text."""

    _MOST = 16
    _MOST_BYTES = 2**24
    _LEAST = len(FIELDS)
    """Number kept whatever their size, because the fields of one record are used in turn."""

    def __init__(self) -> None:
        self._found: dict[object, tuple[Mapping[Any, Any], int]] = {}
        """Evidence and its size, the last used at the end."""

    def __call__(self, key: object, load: Callable[[], tuple[Mapping[Any, Any], int]]) -> Mapping[Any, Any]:
        """Return the evidence of `key`, which `load` returns with its size."""
        held = self._found.pop(key, None) or load()
        self._found[key] = held
        while len(self._found) > self._LEAST and (len(self._found) > self._MOST or self._num_bytes > self._MOST_BYTES):
            del self._found[next(iter(self._found))]
        return held[0]

    @property
    def _num_bytes(self) -> int:
        return sum(size for _, size in self._found.values())


_kept = _Kept()


def _of_file(path: Path, field: str) -> Mapping[Any, Any]:
    def load() -> tuple[Mapping[Any, Any], int]:
        content = _content(path)
        try:
            value = _loads(content)
        except (ValueError, RecursionError) as error:
            raise EvidenceError(f"{path.name}: {describe_error(error)}") from error
        return _decoded(field, value, path), len(content)

    return _kept((path, field), load)


def _of_line(path: Path, offset: int, field: str) -> Mapping[Any, Any]:
    def load() -> tuple[Mapping[Any, Any], int]:
        try:
            with open_lines(path) as file:
                line = file.at(offset)
            value = migrate(_loads(line))["equivalence"][field]
        except Exception as error:
            raise EvidenceError(f"{path.name} at byte {offset}: {describe_error(error)}") from error
        return _decoded(field, value, path), len(line)

    return _kept((path, offset, field), load)


def _loads(text: bytes | str) -> Any:  # noqa: ANN401
    """Return the value of JSON text. Raises `ValueError` if it has more lists and objects than honest text could."""
    marks: tuple[Any, Any] = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, marks)) > _FEW_PARTS + len(text) // _BYTES_A_PART:
        raise ValueError(f"{len(text):,} characters of little but brackets; no Meshmark wrote that")
    return json.loads(text)


def _content(path: Path) -> bytes:
    """Return the content of an evidence file. Raises `EvidenceError` unless it matches the hash in the file's name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise EvidenceError(f"{path.parent.name}/{path.name} is no file")
        with gzip.open(path) as file:
            content = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise EvidenceError(f"{path.parent.name}/{path.name}: {describe_error(error)}") from error
    if len(content) > LARGEST or hashlib.sha256(content).hexdigest() != path.name.partition(".")[0]:
        raise EvidenceError(f"{path.parent.name}/{path.name} is damaged: it does not hold what its name says")
    return content


def _decoded(field: str, value: object, path: Path) -> Mapping[Any, Any]:
    try:
        found: Mapping[Any, Any] = decode(FIELDS[field], value)
    except Exception as error:
        raise EvidenceError(f"{path.name}: {field}: {describe_error(error)}") from error
    return found


# --- The file of records.

CUT_OFF = "a run was cut off there"
"""Text of a complaint about a torn line."""
_COMPLAINT_CHARACTERS = 500
_MOST_COMPLAINTS = 100_000
"""Number of complaints that are kept. A small packed file may hold millions of bad lines."""
_PATIENCE_SECONDS = 10.0
"""How long one line waits for another run that appends one. A run that has the folder for itself keeps it longer."""
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
    example because an adapter reported an invalid value or the line is too long.
    """
    value = encode(record)
    text = json.dumps(value)
    _parse(text.encode())
    _expect_short(value, len(text))
    if not evidence:
        return text.encode() + b"\n"
    evidence.put_aside(value)
    line = json.dumps(value).encode() + b"\n"
    _expect_at_most(LONGEST_LINE, len(line), "a line")
    return line


def _expect_short(value: Mapping[str, Any], size: int) -> None:
    """Raise `ValueError` if the line of an encoded record of `size` characters, or evidence of it, is longer than what
    is read. This is the same on every node, of which one writes.
    """
    if size < LONGEST_LINE:
        return
    sizes = {name: len(json.dumps(value.get("equivalence", {}).get(name, {}))) for name in FIELDS}
    for name, its in sizes.items():
        _expect_at_most(LARGEST, its, name)
    _expect_at_most(LONGEST_LINE, size - sum(sizes.values()) + 1, "a line")


def _expect_at_most(most: int, size: int, what: str) -> None:
    if size > most:
        raise ValueError(f"{what} of {size:,} bytes, expected at most {most:,}")


class RecordFile:
    """Appends records and sessions to DIR/records.jsonl, one per line.

    Each record is on disk before the next case starts. A line is written only after the evidence that it names.
    """

    def __init__(self, folder: Path, *, patience: float = 0.0) -> None:
        """Raise `ResultsError` if the folder is not writable, or another run uses it for `patience` seconds more."""
        self.path = folder.absolute() / "records.jsonl"  # the working directory may be another by the last record
        self._evidence = EvidenceFolder(self.path.parent)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_pipe(self.path)
            # Unbuffered: a line that failed to be written must not appear later, after other lines.
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ResultsError(
                f"results folder {str(folder)!r}: {error.strerror}; name another with --results"
            ) from error
        try:
            self._lock(patience)
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
        _OPEN.add(self)

    def _lock(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)

    def _end_last_line(self) -> None:
        """End a line that an earlier run left unfinished, so that it does not swallow the next one."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record: Record | Session) -> None:
        """Append one line. Raises the errors of `append_line` and `line_of`."""
        self.append_line(line_of(record, self._evidence))

    def append_line(self, line: bytes) -> None:
        """Append a line, given with its end.

        Raises `ResultsError` if it does not reach the disk or the file is no longer at `path`.
        """
        end = os.fstat(self._file.fileno()).st_size
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

    @property
    def is_open(self) -> bool:
        return not self._file.closed

    def close(self) -> None:
        """Close the file. Raises `ResultsError` if it is no longer at its path."""
        if not self.is_open:  # it has been said
            return
        with self._file:
            self._expect_in_place()


_OPEN = weakref.WeakSet[RecordFile]()
"""Files of this process, which its own locks would keep from being opened once more."""


@contextlib.contextmanager
def shared_file(folder: Path) -> Iterator[RecordFile]:
    """Provide a folder's file of records for one line: the one that this process has open, or else a new one.

    Raises `ResultsError` as `RecordFile` does.
    """
    path = (folder / "records.jsonl").resolve()
    for file in tuple(_OPEN):
        if file.is_open and file.path.resolve() == path:
            yield file
            return
    with contextlib.closing(RecordFile(folder, patience=_PATIENCE_SECONDS)) as file:
        yield file


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The content of a results folder."""

    records: list[Record]
    complaints: list[str]
    """One complaint per unreadable line. The other lines are good."""
    sessions: list[Session] = field(default_factory=list)
    num_lost: int = 0
    """Records that `merge` left out because their evidence is damaged."""


def read_records(folder: Path, *, latest: bool = False) -> Reading:
    """Read every good line of DIR/records.jsonl, or of a file, with a complaint for each bad one.

    A file may be packed (`.jsonl.gz`).

    `latest` keeps only the last of several records of one pass over one case on one device, before it the one that is
    `decisive` if that is another, which is all that a report shows; and the last of several sessions.

    Raises `ResultsError` when there is no such file, or no good line in it.
    """
    path = records_path(folder)
    records, sessions, complaints = dict[object, list[Record]](), dict[object, Session](), list[str]()
    shared, num_unread = _Shared(), 0
    try:
        with open_lines(path) as file, _without_collections():
            for number, line in enumerate(file, start=1):
                try:
                    parsed = _parse(line, (path, file.offset), shared) if line.strip() else None
                except Exception as error:  # whatever a line holds, the others are kept
                    num_unread += 1
                    if num_unread <= _MOST_COMPLAINTS:
                        complaints.append(complaint(path, number, error))
                    parsed = None
                if isinstance(parsed, Record):
                    key = _pass_of(parsed) if latest else number
                    records[key] = [*filter(was_wrong, records.get(key, ())), parsed]
                elif parsed:
                    sessions[parsed.session if latest else number] = parsed
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or describe_error(error)
        raise ResultsError(f"no records at {str(path)!r}: {why}; run `pytest suites --results DIR` first") from error
    if num_unread > _MOST_COMPLAINTS:
        complaints.append(f"{path.name}: {num_unread - _MOST_COMPLAINTS:,} more lines cannot be read")
    if not records and not sessions:
        raise ResultsError(
            f"{str(path)!r} holds no record that can be read: {'; '.join(complaints[:3]) or 'it is empty'}"
        )
    if latest:
        gc.freeze()  # what a report has read stays until its end, and nobody need look through it again
    kept = list[Record]()
    for of_one_pass in records.values():
        counts, last = decisive(of_one_pass), of_one_pass[-1]
        kept += [last] if counts is last else [counts, last]
    return Reading(records=kept, complaints=complaints, sessions=list(sessions.values()))


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
        form = marshal.dumps(value, 2)  # from version 3 on the bytes depend on other references to the value's parts
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


def complaint(path: Path, number: int, error: Exception) -> str:
    """Return a complaint about a line of a file that could not be read because of `error`."""
    sentence = isinstance(error, ValueError | TypeError)
    reason = clip(str(error) if sentence else describe_error(error), _COMPLAINT_CHARACTERS)
    return f"{path.name} line {number}: {reason}"


def json_of(line: bytes) -> Any:  # noqa: ANN401
    """Return the value of a line. Raises `ValueError` if it is torn or too long."""
    if isinstance(line, LongLine):
        raise ValueError(f"the line has more than {LONGEST_LINE >> 20} MiB, as no record has")
    try:
        return _loads(line.decode(errors="replace"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not whole JSON ({error.msg} at character {error.pos}); {CUT_OFF}") from error


def _parse(line: bytes, place: tuple[Path, int] | None = None, shared: _Shared | None = None) -> Record | Session:
    """Parse a line. With its `place` (file and offset of the line), bulky parts are loaded on use."""
    value = migrate(json_of(line))
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
    complaints, held, num_lost = list[str](), set[object](), 0
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
                if (name := _name(line)) in held:
                    continue
                try:
                    file.append(line)
                except EvidenceError as error:  # of one record, whose evidence is damaged
                    complaints.append(f"{folder.name}: {error}")
                    num_lost += 1
                    continue
                held.add(name)
    merged = read_records(into)
    complaints += merged.complaints
    return Reading(records=merged.records, complaints=complaints, sessions=merged.sessions, num_lost=num_lost)


def _name(line: Record | Session) -> object:
    """Return a key that no other line has."""
    if isinstance(line, Session):
        return line.session, line.exit_code
    about = line.conformance
    return line.task, line.case, about.base, about.scenario, line.environment.date, line.launch.seconds
