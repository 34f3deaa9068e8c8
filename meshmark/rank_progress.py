"""Progress marks of ranks, from which a launcher tells a slow rank from one that hangs.

A rank is one process, so its mark belongs to the process. The code that does the work calls `begin` and `advance`.
These cost a microsecond, and do nothing if nobody watches. The mark is a file mapped into memory, which the launcher
can read even when the rank no longer responds.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Phase(StrEnum):
    """Phase of a rank, and the unit that it counts in that phase."""

    JOIN = "joining the other ranks"
    BUILD = "building the engine"
    TRAIN = "steps"
    GATHER = "bringing together what ranks computed"
    TRUTH = "gradients of the float64 truth"
    EXPLAIN = "float64 gradients to name the defect by"


class Pace(StrEnum):
    """A rank's activity when the time limit expired."""

    SLOW = "slow"
    """It made progress until the end, and only needs more time."""
    WAITS = "waits"
    """It had finished its part and was waiting for other ranks."""
    HUNG = "hung"
    """It made no progress in the middle of its work."""


EXPLAIN_SECONDS = 300.0
"""Seconds past the time limit that a rank may take to name a defect. The time limit is for the training, and a verdict
is not lost because its explanation took long.
"""
LAST_PART = 0.5
"""Share of the time limit. A rank without progress for this long hangs, however long its units took before."""
STALL = 5.0
"""A rank without progress for this many times the longest unit of the same phase hangs."""
STALL_SECONDS = 2.0
"""Silence in seconds that a busy machine may cause."""

_LAYOUT = struct.Struct("qqqdd")
_PHASES = list(Phase)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Progress of a rank. Times are from the machine's monotonic clock, which all processes share."""

    phase: Phase
    done: int = 0
    total: int = 0
    """Units of the phase, or 0 if unknown."""
    time: float
    """Time of the last progress."""
    longest: float = 0.0
    """Longest duration of a unit of this phase, in seconds."""

    def pace(self, *, now: float, limit: float) -> Pace:
        """Return the pace of a rank with this mark that had `limit` seconds until `now`."""
        silence = now - self.time
        stands = silence > LAST_PART * limit
        if self.done:
            stands = stands or silence > max(STALL * self.longest, STALL_SECONDS)
        if not stands:
            return Pace.SLOW
        return Pace.WAITS if self.phase is Phase.GATHER or 0 < self.total <= self.done else Pace.HUNG

    def text(self, *, now: float) -> str:
        """Return the progress in words, such as `4 of 10 steps, the last 2.1 s ago`."""
        ago = f"{now - self.time:.1f} s"
        if not self.total and not self.done:
            return f"{self.phase} for {ago}"
        count = f"{self.done} of {self.total}" if self.total else f"{self.done}"
        return f"{count} {self.phase}, the last {ago} ago" if self.done else f"{count} {self.phase}, begun {ago} ago"


class _Marker:
    """Writes this process's mark."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.memory: mmap.mmap | None = None
        self.begin(Phase.JOIN)

    def open(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, _LAYOUT.size)
        self.path, self.memory = path, mmap.mmap(file, _LAYOUT.size)
        os.close(file)

    def begin(self, phase: Phase, total: int = 0) -> None:
        self.phase, self.total, self.done, self.longest, self.time = phase, total, 0, 0.0, time.monotonic()
        self._write()

    def advance(self) -> None:
        now = time.monotonic()
        self.done, self.longest, self.time = self.done + 1, max(self.longest, now - self.time), now
        self._write()

    def tick(self) -> None:
        self.time = time.monotonic()
        self._write()

    def _write(self) -> None:
        if self.memory:
            _LAYOUT.pack_into(self.memory, 0, _PHASES.index(self.phase), self.done, self.total, self.time, self.longest)


_marker = _Marker()


def watch(path: Path) -> None:
    """Start to write this process's mark to `path`."""
    _marker.open(path)
    begin(Phase.JOIN)


def path() -> Path | None:
    """Return where this process writes its mark. A process that works for it can write there too."""
    return _marker.path


def begin(phase: Phase, total: int = 0) -> None:
    """Enter `phase`, which has `total` units (0 if unknown)."""
    _marker.begin(phase, total)


def advance() -> None:
    """Record that one more unit is done."""
    _marker.advance()


def tick() -> None:
    """Record a sign of life during work that is not a unit of the phase."""
    _marker.tick()


def read_mark(path: Path, *, started: float) -> Mark:
    """Return the last mark at `path`. Without one, return that of a rank that `started` and did nothing since."""
    content = path.read_bytes() if path.is_file() else b""
    if len(content) < _LAYOUT.size or not any(content):
        return Mark(phase=Phase.JOIN, time=started)
    phase, done, total, when, longest = _LAYOUT.unpack(content[: _LAYOUT.size])
    return Mark(phase=_PHASES[phase], done=done, total=total, time=when, longest=longest)
