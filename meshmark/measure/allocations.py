"""Allocations of this process: the allocators' counts and logs, and the lifetime of every storage.

The profiler reports what the threads that it watches allocate and free. Gloo's own threads also free memory, which it
does not see. But every change includes the allocator's own count of all bytes, whoever freed them, and this count shows
when storages are gone.

On a GPU, PyTorch's CUDA allocator keeps a log of everything that any thread allocates and frees, such as what
autograd's thread frees when the last of a graph goes with it. The log has the requested sizes, whereas the allocator
counts whole blocks, so sizes and counts come from the profiler wherever it saw the change.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshmark.errors import MeshmarkError

# --- Peak memory of an operation, besides what was held when it began.

_MOST_RESIDENT, _RESIDENT = "VmHWM", "VmRSS"
_FORGET_MOST = "5"
"""Value for `/proc/PID/clear_refs` that resets the peak (proc_pid_clear_refs(5))."""


class ExtraPeak:
    """A reusable context that records the most memory any of its blocks took beyond what was held at its start.

    On a GPU this is the allocator's count. On a CPU it is resident memory, after free memory was returned to the
    system.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes, self._before = device, 0, 0

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text(_FORGET_MOST)
            self._before = _resident(_RESIDENT)

    def __exit__(self, *raised: object) -> None:
        on_gpu = self.device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self.device) if on_gpu else _resident(_MOST_RESIDENT)
        self.num_bytes = max(self.num_bytes, most - self._before)


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status tells no {name}"
    return 1024 * int(found[1])


# --- The allocators' own counts of bytes that are allocated and not freed, by any thread.

_ATTEMPTS = 5
"""Largest number of attempts to take a profile that sees an allocation."""
_SETTLE_SECONDS = 0.02
"""Time for gloo's threads to release tensors, which takes them microseconds after a collective is reported done."""


@functools.cache
def count_all_threads() -> None:
    """Make PyTorch's CPU allocator count what any thread allocates and frees.

    By default it counts only threads under a profiler, so that memory freed by another thread stays counted. The flag
    can only be set through the C++ variable.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def settle(device: torch.device) -> int:
    """Wait until the work of a step is over, and make the allocator report its count. Returns the time.

    Clears cuBLAS's workspaces in the same allocator, which are not tensors of the step, and are allocated again on
    demand.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
    # NCCL releases tensors in the thread that calls it next: there is nothing to wait for.
    if not (torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"):
        time.sleep(_SETTLE_SECONDS)
    told = torch.empty(1, device=device)
    del told  # the end of it is the last change before this time
    return time.time_ns()


def cublas_workspace_bytes(config: str) -> int:
    """Return how much PyTorch allocates for cuBLAS per stream and thread.

    `config` is a CUBLAS_WORKSPACE_CONFIG such as ":4096:8": pairs of a size in KiB and a count. Returns 0 if it is not
    set or not understood.
    """
    numbers = [int(part) for part in config.strip().lstrip(":").split(":") if part.isdigit()]
    if not numbers or len(numbers) % 2:
        return 0
    return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))


def allocated_bytes(device: torch.device) -> int:
    """Return the allocator's own count. No profiler may be running.

    On a CPU the allocator reports it only to a profiler, and `count_all_threads` must have been called before the
    first allocation that should count. On a machine with five times as many runnable processes as cores, a profile was
    once empty; in that case another is taken.

    Raises `MeshmarkError` if the profiler sees nothing at all.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    for _ in range(_ATTEMPTS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as short:
            told = torch.empty(1)
            del told
        results: Any = short.profiler.kineto_results
        stack, changes = list(results.experimental_event_tree()), []
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            changes += [event] if event.name == "[memory]" else []
        if changes:
            return int(max(changes, key=lambda event: event.start_time_ns).extra_fields.total_allocated)
    raise MeshmarkError(f"PyTorch's profiler saw no allocation in {_ATTEMPTS} attempts: memory cannot be counted")


class CudaPeaks:
    """Peak bytes allocated and reserved within windows. Does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.allocated, self.reserved = device, 0, 0

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of tensors that were gathered to be compared are not the step's
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> None:
        if self._device.type == "cuda":
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(self._device))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self._device))


# --- Reconstruct the lifetime of every storage from an allocator's changes.

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
class HeldStorages:
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


def timeline(
    changes: Sequence[Change], known: frozenset[int] = frozenset(), held: HeldStorages | None = None
) -> Timeline:
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


def _hold(lives: Sequence[_Life], held: HeldStorages) -> None:
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


# --- The log that PyTorch's CUDA allocator keeps of everything any thread allocates and frees.

BLOCK_BYTES = 512
"""The allocator hands out multiples of this."""
_CLOSE_NS = 1_000_000
"""Largest distance between the times that the profiler and the log give one change. Both read one clock, the log in
microseconds. An address is not allocated, freed and allocated again in so short a time as to confuse the two: of
several, the nearest is taken."""
_NOT_SEEN = -1
"""In place of the thread of a change that the profiler did not see."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """An allocation, or its end."""

    time_ns: int
    address: int
    num_bytes: int
    """Bytes asked for, negative at the end."""


def start_log() -> None:
    """Make the allocator log from now on, without stacks."""
    torch.cuda.memory._record_memory_history("all", context=None)


def stop_log(device: torch.device) -> list[Logged]:
    """Return the log of `device` since `start_log`, and stop it."""
    traces = torch.cuda.memory._snapshot(device)["device_traces"]
    torch.cuda.memory._record_memory_history(None)
    return read_log(traces[device.index or 0])


def read_log(trace: Iterable[Mapping[str, Any]]) -> list[Logged]:
    """Return the allocations and ends among the entries of one device, as `torch.cuda.memory._snapshot` gives them.

    The allocator stops counting a block when it is told to free it, even if another stream still uses it.
    """
    signs = {"alloc": 1, "free_requested": -1}
    return [
        Logged(time_ns=entry["time_us"] * 1000, address=entry["addr"], num_bytes=signs[entry["action"]] * entry["size"])
        for entry in trace
        if entry["action"] in signs
    ]


def with_unseen(changes: Sequence[Change], log: Sequence[Logged]) -> list[Change]:
    """Return `changes` and what the log has besides them since the first, in order of time.

    An inserted allocation has the requested size, rounded up to blocks, and an inserted end the size of its allocation.
    The count after either is the one before it and the change.
    """
    log = [each for each in log if changes and each.time_ns + _CLOSE_NS >= changes[0].time_ns]
    merged = sorted([*changes, *_inserted(log, _seen(changes, log))], key=lambda change: change.time_ns)
    return list(_counted(merged))


def _seen(changes: Sequence[Change], log: Sequence[Logged]) -> dict[int, Change]:
    """Return which change of the profiler an entry of the log is, by the entry's index."""
    places = defaultdict[tuple[int, bool], list[int]](list)
    for i, each in enumerate(log):
        places[each.address, each.num_bytes > 0].append(i)
    found = dict[int, Change]()
    for change in changes:
        alike = places[change.address, change.num_bytes > 0]
        after = bisect.bisect_left(alike, change.time_ns, key=lambda i: log[i].time_ns)
        near = [i for i in alike[max(0, after - 2) : after + 2] if i not in found]
        best = min(near, key=lambda i: abs(log[i].time_ns - change.time_ns), default=None)
        if best is not None and abs(log[best].time_ns - change.time_ns) <= _CLOSE_NS:
            found[best] = change
    return found


def _inserted(log: Sequence[Logged], seen: Mapping[int, Change]) -> Iterator[Change]:
    """Yield the entries that the profiler did not see. Those close to the first change may be from before it."""
    first_ns = min((change.time_ns for change in seen.values()), default=0)
    there = dict[int, Change]()
    for i, each in enumerate(log):
        change = seen.get(i)
        if change is None and (each.address in there or each.time_ns >= first_ns):
            begun = there.get(each.address)
            if each.num_bytes < 0 and begun is None:
                continue  # a storage from before
            size = -begun.num_bytes if begun and each.num_bytes < 0 else -(-each.num_bytes // BLOCK_BYTES) * BLOCK_BYTES
            # The log's clock is coarse: what ended within a microsecond did not end before it began.
            time_ns = max(each.time_ns, begun.time_ns + 1 if begun else 0)
            change = Change(time_ns=time_ns, address=each.address, num_bytes=size, total_bytes=0, thread=_NOT_SEEN)
            yield change
        if change and change.num_bytes > 0:
            there[each.address] = change
        else:
            there.pop(each.address, None)


def _counted(changes: Iterable[Change]) -> Iterator[Change]:
    """Yield `changes` with the counts that those lack which were not seen."""
    total = 0
    for change in changes:
        if change.thread == _NOT_SEEN:
            change = dataclasses.replace(change, total_bytes=total + change.num_bytes)
        total = change.total_bytes
        yield change
