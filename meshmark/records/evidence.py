"""Storage for bulky evidence: compressed files next to the records, named by content and read on demand.

The deviation of every tensor from the truth at every step, and the noise of rounding alone, make up nine tenths of
a record. Verdicts were computed from this evidence, but a table of verdicts needs none of it. A line of records.jsonl
names the file that holds the evidence. The noise of a workload is the same in all its records, and is therefore one
file.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from meshmark.errors import EvidenceError
from meshmark.judge.deviation import Deviations
from meshmark.judge.tolerance_model import Comparisons
from meshmark.records.migration import migrate
from meshmark.serial import decode
from meshmark.text import describe_error

FIELDS: dict[str, Any] = {"deviations": Deviations, "noise": Comparisons, "factors": Mapping[str, float]}
"""Fields of `EquivalenceEvidence` that may be stored in a separate file, and their types."""
SMALL = 4096
"""Size in characters up to which a field stays in the record's line."""
_FEW = 8
"""Number of quantities up to which a field inside a line is read together with it."""
LARGEST = 2**28
"""Largest size in bytes of evidence that is read. A compressed file from elsewhere may expand to any size."""
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
        for field in FIELDS:
            text = json.dumps(evidence.get(field, {}))
            if len(text) > SMALL:
                with contextlib.suppress(OSError):
                    evidence[field] = self._put(text.encode())

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


def open_lines(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a file of records for reading, packed by gzip or not."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


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
    for field in FIELDS:
        value = evidence.get(field)
        if isinstance(value, str):
            if not _NAME.fullmatch(value):
                raise ValueError(f"{field} are said to be in {value!r:.200}, expected evidence/SHA256.json.gz")
            evidence[field] = Stored(functools.partial(_of_file, path.parent / value, field))
        elif isinstance(value, dict) and len(value) > _FEW:
            evidence[field] = Stored(functools.partial(_of_line, path, offset, field))


@functools.lru_cache(maxsize=16)
def _of_file(path: Path, field: str) -> Mapping[Any, Any]:
    try:
        value = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path.name}: {describe_error(error)}") from error
    return _decoded(field, value, path)


@functools.lru_cache(maxsize=16)
def _of_line(path: Path, offset: int, field: str) -> Mapping[Any, Any]:
    try:
        with open_lines(path) as file:
            file.seek(offset)
            value = migrate(json.loads(file.readline()))["equivalence"][field]
    except Exception as error:
        raise EvidenceError(f"{path.name} at byte {offset}: {describe_error(error)}") from error
    return _decoded(field, value, path)


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
