"""From what an allocator told, change by change, to the life of every storage.

The profiler tells of what the threads that it watches allocate and free. Gloo's own threads free as well, unseen; but
every change carries the allocator's own count of all bytes, whoever freed them, and that decides when they are gone.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MOST_SUMS = 4096
"""Of storages that may have been freed between two changes: there are rarely two."""
_MOST_WORK = 4_000_000
"""Sums that the search for such storages looks at over a whole pass: a second or two of Python. It is a count and not a
time, so that a busy machine finds what a quiet one does."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """An allocation or, with negative bytes, its end."""

    time_ns: int
    address: int
    num_bytes: int
    total_bytes: int
    """The allocator's own count, after this change, of all that any thread holds."""
    thread: int = 0
    kernel: int | None = None
    """Where a kernel did it by itself: when that began."""
    is_workspace: bool = False
    """Whether it is what PyTorch keeps for cuBLAS to work in."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What a kernel allocated and gave back before it was done, with what it had of that already: no tensor, which
    nobody can hold or save, and as large as the CPU's instructions want it."""

    time_ns: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One storage's life."""

    address: int
    num_bytes: int
    start_ns: int
    stop_ns: int | None
    """None when it was alive to the end."""
    freed_elsewhere: bool = False
    """By another thread than that which began; if by one that is not watched, no later than `stop_ns`: the next change,
    whose count lacks it."""
    is_workspace: bool = False

    def alive(self, time_ns: int) -> bool:
        return self.start_ns <= time_ns and (self.stop_ns is None or time_ns < self.stop_ns)


@dataclass(kw_only=True)
class _Life:
    address: int
    num_bytes: int
    start_ns: int
    begun: int
    """Which change began it."""
    reused: float = math.inf
    """Which change allocated its address again: by then it had ended."""
    seen: int | None = None
    """Which change was its end, where that was seen."""
    seen_ns: int | None = None
    stop_ns: int | None = None
    elsewhere: bool = False
    is_workspace: bool = False
    held_ns: int = 0
    """When it was still there, for it was named then."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Storages that were there at one instant."""

    time_ns: int
    num_bytes: Mapping[int, int]
    """By address."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All lives, and the allocator's count."""

    lives: list[Allocation]
    times: list[int]
    totals: list[int]
    """After each change, at the same place in `times`."""
    workspaces: list[Workspace] = field(default_factory=list)
    """Which are in no life and no total."""
    ends_known: bool = True
    """Whether the ends that nobody saw were all looked for. Where not, lives may last too long; totals are right."""

    def total(self, time_ns: int) -> int:
        """Bytes that the allocator counted at this time."""
        index = bisect.bisect_right(self.times, time_ns)
        return self.totals[index - 1] if index else 0

    def peak(self, start_ns: int, stop_ns: int) -> tuple[int, int]:
        """The most bytes counted in [start, stop), and the first instant of that."""
        first, last = (bisect.bisect_left(self.times, t) for t in (start_ns, stop_ns))
        found = [(self.total(start_ns), -start_ns)]
        found += [(n, -t) for t, n in zip(self.times[first:last], self.totals[first:last], strict=True)]
        most, negative = max(found)
        return most, -negative

    def counted_peak(self, start_ns: int, stop_ns: int) -> int:
        """The most bytes that the allocator counted in [start, stop), workspaces among them."""
        working = [w for w in self.workspaces if start_ns <= w.time_ns < stop_ns]
        return max([self.peak(start_ns, stop_ns)[0], *(self.total(w.time_ns) + w.num_bytes for w in working)])


def timeline(changes: Sequence[Change], known: frozenset[int] = frozenset(), held: Held | None = None) -> Timeline:
    """`changes` in order of time; what was there before the first of them does not count. `known`: addresses of
    storages that are alive at the end."""
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
    """What is left of `changes` and of their counts, and what kernels gave back themselves."""
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
    """The same, with counts that leave out storages of before."""
    before, there, found = changes[0].total_bytes - max(changes[0].num_bytes, 0) if changes else 0, set[int](), []
    for change in changes:
        if change.num_bytes > 0:
            there.add(change.address)
        elif change.address not in there and before + change.num_bytes >= 0:
            before += change.num_bytes
        found.append(dataclasses.replace(change, total_bytes=change.total_bytes - before))
    return found


def _lives(changes: Sequence[Change]) -> list[_Life]:
    """In order of their start, as far as they were seen."""
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
    """The latest at each address; of another size it is not the storage that was named."""
    there = {life.address: life for life in lives if life.start_ns <= held.time_ns}
    for address, num_bytes in held.num_bytes.items():
        if (life := there.get(address)) and life.num_bytes == num_bytes:
            life.held_ns = held.time_ns


class _Budget:
    """Work that the search for unseen ends may still do, over the whole of a pass."""

    def __init__(self) -> None:
        self.left = _MOST_WORK

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


def _find_ends(changes: Sequence[Change], lives: Sequence[_Life], unseen: Sequence[_Life]) -> bool:
    """Set `stop_ns` of those of `unseen` that the allocator no longer counts. False where that took more work than is
    allowed: then nobody knows the ends from there on.

    Every change asks which storages have gone since the last one. A search that found nobody is not repeated until its
    answer can differ: other bytes are missing, a new storage waits, or those that were named may go. What all searches
    cost together is bounded by `_Budget`, whatever a framework allocates.
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
            # Of two storages of one size, the one whose address is allocated again first must have gone first.
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
    """Those, first come first, that together have `num_bytes`; nobody where that is not to be found."""
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
