"""How far each rank of a launch has come, for a launcher that must tell a slow rank from one that hangs.

A rank is one process, so its mark is the process's: whatever does the work says `begin` and `advance`, which cost a
microsecond and do nothing where nobody watches. The mark is a file mapped into memory; the launcher reads it even when
the rank answers nothing any more.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Phase(StrEnum):
    """What a rank is at, and what it counts there."""

    JOIN = "joining the other ranks"
    BUILD = "building the engine"
    TRAIN = "steps"
    GATHER = "bringing together what ranks computed"
    TRUTH = "gradients of the float64 truth"
    EXPLAIN = "float64 gradients to name the defect by"


class Pace(StrEnum):
    """What a rank was doing when its time was up."""

    SLOW = "slow"
    """It came on until the end: more time is all that it lacks."""
    WAITS = "waits"
    """It had done all of its part and stood still: that is for the others to explain."""
    HUNG = "hung"
    """It stood still amid its work."""


LAST_PART = 0.5
"""Of the time limit: a rank that did nothing in it stands still, however long its work took before."""
STALL = 5.0
"""Times the longest that any unit of the same phase took: a rank that is silent for longer stands still."""
STALL_SECONDS = 2.0
"""A silence that a busy machine may cause."""

_LAYOUT = struct.Struct("qqqdd")
_PHASES = list(Phase)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How far a rank has come. Times are of the machine's monotonic clock, which its processes share."""

    phase: Phase
    done: int = 0
    total: int = 0
    """Units of the phase; 0 where they are not known."""
    time: float
    """Of the last progress."""
    longest: float = 0.0
    """Seconds that a unit of this phase took at most."""

    def pace(self, *, now: float, limit: float) -> Pace:
        """Of a rank with this mark that had `limit` seconds, until `now`."""
        silence = now - self.time
        stands = silence > LAST_PART * limit
        if self.done:
            stands = stands or silence > max(STALL * self.longest, STALL_SECONDS)
        if not stands:
            return Pace.SLOW
        return Pace.WAITS if self.phase is Phase.GATHER or 0 < self.total <= self.done else Pace.HUNG

    def text(self, *, now: float) -> str:
        """`4 of 10 steps, the last 2.1 s ago`."""
        ago = f"{now - self.time:.1f} s"
        if not self.total and not self.done:
            return f"{self.phase} for {ago}"
        count = f"{self.done} of {self.total}" if self.total else f"{self.done}"
        return f"{count} {self.phase}, the last {ago} ago" if self.done else f"{count} {self.phase}, begun {ago} ago"


class _Marker:
    """Writes this process's mark."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.begin(Phase.JOIN)

    def open(self, path: Path) -> None:
        with open(path, "wb+") as file:
            file.truncate(_LAYOUT.size)
            self.memory = mmap.mmap(file.fileno(), _LAYOUT.size)

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
    """From here on leave this process's mark at `path`."""
    _marker.open(path)
    begin(Phase.JOIN)


def begin(phase: Phase, total: int = 0) -> None:
    """This process turns to `phase`, of `total` units (0: not known)."""
    _marker.begin(phase, total)


def advance() -> None:
    """One more unit is done."""
    _marker.advance()


def tick() -> None:
    """It works still, at what is no unit of its phase."""
    _marker.tick()


def read_mark(path: Path, *, started: float) -> Mark:
    """What the rank last left at `path`; that of a rank that was `started` and did nothing since, if it left none."""
    content = path.read_bytes() if path.is_file() else b""
    if len(content) < _LAYOUT.size or not any(content):
        return Mark(phase=Phase.JOIN, time=started)
    phase, done, total, when, longest = _LAYOUT.unpack(content[: _LAYOUT.size])
    return Mark(phase=_PHASES[phase], done=done, total=total, time=when, longest=longest)
