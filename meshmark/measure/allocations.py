"""Reconstruct the lifetime of every storage from an allocator's changes.

The profiler reports what the threads that it watches allocate and free. Gloo's own threads also free memory, which it
does not see. But every change includes the allocator's own count of all bytes, whoever freed them, and this count
shows when storages are gone.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MOST_SUMS = 4096
"""Largest number of sums of storages that may have been freed between two changes. There are rarely two storages."""
_MOST_WORK = 4_000_000
"""Limit on the sums that the search for such storages examines in a whole pass: one or two seconds of Python.

It is a count and not a time, so that a busy machine gets the same result as an idle one.
"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """An allocation or, with negative bytes, its end."""

    time_ns: int
    address: int
    num_bytes: int
    total_bytes: int
    """The allocator's own count of all threads' bytes after this change."""
    thread: int = 0
    kernel: int | None = None
    """Start time of the kernel that made the change by itself, or None."""
    is_workspace: bool = False
    """True if it is a workspace that PyTorch keeps for cuBLAS."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Memory that a kernel allocated and freed before it ended, together with what it already held.

    It is not a tensor and cannot be held or saved. Its size depends on the CPU's instruction set.
    """

    time_ns: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Lifetime of one storage."""

    address: int
    num_bytes: int
    start_ns: int
    stop_ns: int | None
    """End of the lifetime, or None if it was alive to the end."""
    freed_elsewhere: bool = False
    """True if another thread freed the storage than allocated it.

    If that thread is not watched, the storage was freed no later than `stop_ns`, the next change, whose count lacks
    it.
    """
    is_workspace: bool = False

    def alive(self, time_ns: int) -> bool:
        return self.start_ns <= time_ns and (self.stop_ns is None or time_ns < self.stop_ns)


@dataclass(kw_only=True)
class _Life:
    address: int
    num_bytes: int
    start_ns: int
    begun: int
    """Index of the change that began it."""
    reused: float = math.inf
    """Index of the change that allocated its address again. It had ended by then."""
    seen: int | None = None
    """Index of the change that ended it, if that was seen."""
    seen_ns: int | None = None
    stop_ns: int | None = None
    elsewhere: bool = False
    is_workspace: bool = False
    held_ns: int = 0
    """Time at which it was still held, because it was named then."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Storages that existed at one instant."""

    time_ns: int
    num_bytes: Mapping[int, int]
    """Bytes by address."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All lifetimes, and the allocator's count."""

    lives: list[Allocation]
    times: list[int]
    totals: list[int]
    """Count after each change, at the same index as in `times`."""
    workspaces: list[Workspace] = field(default_factory=list)
    """Workspaces, which are not part of `lives` or `totals`."""
    ends_known: bool = True
    """True if the search for unseen ends was complete. Otherwise lifetimes may be too long; totals are correct."""

    def total(self, time_ns: int) -> int:
        """Return the bytes that the allocator counted at this time."""
        index = bisect.bisect_right(self.times, time_ns)
        return self.totals[index - 1] if index else 0

    def peak(self, start_ns: int, stop_ns: int) -> tuple[int, int]:
        """Return the most bytes counted in [start, stop), and the first instant with that count."""
        first, last = (bisect.bisect_left(self.times, t) for t in (start_ns, stop_ns))
        found = [(self.total(start_ns), -start_ns)]
        found += [(n, -t) for t, n in zip(self.times[first:last], self.totals[first:last], strict=True)]
        most, negative = max(found)
        return most, -negative

    def peak_with_workspaces(self, start_ns: int, stop_ns: int) -> int:
        """Return the most bytes that the allocator counted in [start, stop), including workspaces."""
        working = [w for w in self.workspaces if start_ns <= w.time_ns < stop_ns]
        return max([self.peak(start_ns, stop_ns)[0], *(self.total(w.time_ns) + w.num_bytes for w in working)])


def timeline(changes: Sequence[Change], known: frozenset[int] = frozenset(), held: Held | None = None) -> Timeline:
    """Return the timeline of `changes`, which are ordered by time.

    Storages from before the first change do not count. `known` is the addresses of storages that are alive at the end.
    """
    changes, workspaces = _without_workspaces(_from_here(changes))
    lives = _lives(changes)
    if held:
        _hold(lives, held)
    at_end = {life.address: life for life in lives}
    unseen = [
        life for life in lives if life.seen_ns is None and not (life is at_end[life.address] and life.address in known)
    ]
    ends_known = _find_ends(changes, lives, unseen)
    return Timeline(
        lives=[
            Allocation(
                address=life.address,
                num_bytes=life.num_bytes,
                start_ns=life.start_ns,
                stop_ns=life.seen_ns or life.stop_ns,
                freed_elsewhere=life.elsewhere,
                is_workspace=life.is_workspace,
            )
            for life in lives
        ],
        times=[change.time_ns for change in changes],
        totals=[change.total_bytes for change in changes],
        workspaces=workspaces,
        ends_known=ends_known,
    )


def _without_workspaces(changes: Sequence[Change]) -> tuple[list[Change], list[Workspace]]:
    """Return `changes` without workspaces, with adjusted counts, and the workspaces that kernels freed themselves."""
    begun, ends = dict[tuple[int, int | None], int](), dict[int, int]()
    for i, change in enumerate(changes):
        place = (change.address, change.kernel)
        if change.kernel is not None and change.num_bytes > 0:
            begun[place] = i
        elif change.kernel is not None and (start := begun.pop(place, None)) is not None:
            ends[start] = i
    own, held = {*ends, *ends.values()}, 0
    kept, workspaces = list[Change](), list[Workspace]()
    for i, change in enumerate(changes):
        if i in own:
            held += change.num_bytes
            workspaces += [Workspace(time_ns=change.time_ns, num_bytes=held)] if i in ends else []
        else:
            kept.append(dataclasses.replace(change, total_bytes=change.total_bytes - held))
    return kept, workspaces


def _from_here(changes: Sequence[Change]) -> list[Change]:
    """Return the changes with counts that exclude storages from before."""
    before, there, found = changes[0].total_bytes - max(changes[0].num_bytes, 0) if changes else 0, set[int](), []
    for change in changes:
        if change.num_bytes > 0:
            there.add(change.address)
        elif change.address not in there and before + change.num_bytes >= 0:
            before += change.num_bytes
        found.append(dataclasses.replace(change, total_bytes=change.total_bytes - before))
    return found


def _lives(changes: Sequence[Change]) -> list[_Life]:
    """Return the lifetimes ordered by start, as far as they were seen."""
    lives, there = list[_Life](), dict[int, _Life]()
    for i, change in enumerate(changes):
        life = there.pop(change.address, None)
        if life and change.num_bytes < 0:
            life.seen, life.seen_ns, life.elsewhere = i, change.time_ns, change.thread != changes[0].thread
        if change.num_bytes > 0:
            if life:
                life.reused = i
            life = _Life(
                address=change.address,
                num_bytes=change.num_bytes,
                start_ns=change.time_ns,
                begun=i,
                is_workspace=change.is_workspace,
            )
            there[change.address] = life
            lives.append(life)
    return lives


def _hold(lives: Sequence[_Life], held: Held) -> None:
    """Mark the latest storage at each address as held. With another size, it is not the storage that was named."""
    there = {life.address: life for life in lives if life.start_ns <= held.time_ns}
    for address, num_bytes in held.num_bytes.items():
        if (life := there.get(address)) and life.num_bytes == num_bytes:
            life.held_ns = held.time_ns


class _Budget:
    """Remaining work for the search for unseen ends, over a whole pass."""

    def __init__(self) -> None:
        self.left = _MOST_WORK

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


def _find_ends(changes: Sequence[Change], lives: Sequence[_Life], unseen: Sequence[_Life]) -> bool:
    """Set `stop_ns` of those `unseen` storages that the allocator no longer counts.

    Returns False if that exceeded the budget; ends after that point are unknown. Every change checks which storages
    have gone since the last one. A failed search is repeated only when its answer may differ: other bytes are missing,
    a new storage waits, or named ones may go. `_Budget` limits the total work, whatever a framework allocates.
    """
    starts = {life.begun: life for life in unseen}
    seen = {life.seen: life for life in lives if life.seen is not None}
    waiting = dict[int, _Life]()  # by address, oldest first: an address has one storage at a time
    named_until = max((life.held_ns for life in unseen), default=0)
    listed, newest, in_vain, budget = 0, -1, None, _Budget()
    for i, change in enumerate(changes):
        gone = list[_Life]()
        if change.num_bytes > 0:
            listed += change.num_bytes
            if taken := waiting.pop(change.address, None):
                gone.append(taken)
            if begun := starts.get(i):
                waiting[change.address], newest = begun, i
        elif life := seen.get(i):
            listed -= life.num_bytes
        missing = listed - sum(w.num_bytes for w in gone) - change.total_bytes
        question = missing, newest, named_until <= change.time_ns
        if missing > 0 and question != in_vain:
            # Of two storages of equal size, the one whose address is allocated again first must have gone first.
            may_be_gone = sorted((w for w in waiting.values() if w.held_ns <= change.time_ns), key=lambda w: w.reused)
            found = _sized(may_be_gone, missing, budget)
            if budget.is_spent:
                return False
            in_vain = None if found else question
            for life in found:
                del waiting[life.address]
            gone += found
        for life in gone:
            life.stop_ns, life.elsewhere = change.time_ns, True
            listed -= life.num_bytes
    return True


def _sized(waiting: Sequence[_Life], num_bytes: int, budget: _Budget) -> list[_Life]:
    """Return storages, the oldest first, that together have `num_bytes`, or nothing if no such set is found."""
    came_from: dict[int, tuple[int, _Life] | None] = {0: None}
    budget.left -= len(waiting)
    for life in waiting:
        budget.left -= len(came_from)
        if budget.is_spent:
            return []
        for total in list(came_from):
            more = total + life.num_bytes
            if more <= num_bytes and more not in came_from and len(came_from) < _MOST_SUMS:
                came_from[more] = total, life
        if num_bytes in came_from:
            break
    chosen, total = list[_Life](), num_bytes
    while step := came_from.get(total):
        total, life = step
        chosen.append(life)
    return chosen[::-1]
