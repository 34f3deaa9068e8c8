"""The log that PyTorch's CUDA allocator keeps of everything any thread allocates and frees.

The profiler does not see what threads free that it does not watch, such as autograd's when the last of a graph goes
with it. The allocator's log does. It has the requested sizes, whereas the allocator counts whole blocks, so sizes and
counts come from the profiler wherever it saw the change.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshmark.measure.allocations import Change

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
