"""Watch this process's allocations and collectives through PyTorch's profiler and flight recorder.

The profiler sees every allocation of the c10 allocators (exact bytes, also from C++) and every collective that was
asked for. The flight recorder has what the backend issued for it and in which group.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshmark.measure import fake_world
from meshmark.measure.allocations import Change
from meshmark.measure.allocator import (
    CudaPeaks,
    allocated_bytes,
    count_all_threads,
    cublas_workspace_bytes,
    settle,
)
from meshmark.measure.allocator_log import Logged, start_log, stop_log, with_unseen
from meshmark.measure.clock import SteadyClock
from meshmark.measure.ends import Ends, Message
from meshmark.measure.flight_recorder import IssuedOperation, dump, issued_operations

_AUTOGRAD_NODE = "autograd::engine::evaluate_function: "
"""Prefix of the profiler's name for a node of the graph in the backward pass, followed by the node's name."""

_KERNELS = frozenset(
    {
        *(f"aten::{product}" for product in ("mm", "addmm", "bmm", "baddbmm")),
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)
"""Operators that allocate workspaces.

oneDNN's products need them for packed operands and wide sums, depending on the CPU's instructions (a bf16 product of
64 by 64 needs none with AVX2, 25 to 34 kB with AVX-512). Attention needs a tile of scores per thread.
"""

_ALLOCATING = frozenset({"aten::empty", "aten::zeros"})
"""Operators through which attention allocates its tile, and also its result, which stays."""

_MOST_LOOKS = 25
"""Most repeated readings after a step that left more memory than those before: half a second on a CPU."""
_BACKEND_EVENT = "gloo:"
POINT_TO_POINT = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_"})
"""Point-to-point calls, as the profiler names them."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A named stretch of time, on the profiler's clock."""

    name: str
    step: int
    start_ns: int
    stop_ns: int

    def contains(self, time_ns: int) -> bool:
        return self.start_ns <= time_ns < self.stop_ns


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor that went into a collective."""

    num_bytes: int
    address: int
    """Address of its storage."""


@dataclass(frozen=True, kw_only=True)
class AskedOperation:
    """A call of PyTorch's communication layer."""

    name: str
    """Name in the profiler, such as `c10d::allreduce_`."""
    time_ns: int
    operands: tuple[tuple[Operand, ...], ...]
    """Operands by argument. An argument that is one tensor has one operand."""
    done_ns: int | None = None
    """When the backend reported it done, or None if it did not."""

    ranks: tuple[int, ...] = ()
    """Both ends of a point-to-point call. The ranks of a collective come from what was issued for it."""

    @property
    def addresses(self) -> set[int]:
        return {operand.address for argument in self.operands for operand in argument}


class Watch:
    """Context manager that sees every allocation between its entry and `rest`, and every collective after `follow`.

    Between `focus` and `rest` it sees the collectives that were asked for; at other times, only what the backend did.
    That needs no profiler, so all steps of a run can be followed. After `rest`, the allocator's bytes are still read
    after every step.

    Tensors allocated before the entry are not seen, so enter before the engine is built. Operands are recorded only
    after `focus`, because the profiler then holds weak references to tensors. PyTorch refuses to swap such tensors,
    which some frameworks do while they build.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.windows: list[Window] = []
        self.steady_ns: dict[int, int] = {}
        """By step: when it was over and the allocator reported what was left."""
        self._rested_bytes: dict[int, int] = {}
        """The allocator's count, by step since `rest`."""
        self.peaks = CudaPeaks(device)
        self._events: list[Any] = []
        self._log: list[Logged] = []
        """The allocator's own, of a GPU."""
        self._recorded: dict[str, Any] = {}
        self._num_unfocused = 0
        """Number of events from before operands were recorded."""
        self._ends = Ends()
        self._focused_messages = slice(0)
        """Slice of the point-to-point calls made while operands were recorded."""
        self._rests = False
        self._least_bytes: int | None = None
        """Fewest bytes that the allocator counted after a step, since the last one before `rest`."""

    def __enter__(self) -> Watch:
        self._clock = SteadyClock()
        count_all_threads()
        if self.device.type == "cuda":
            start_log()
        self._start(operands=False)
        return self

    def follow(self) -> None:
        """Start to record what the backend does. Call it when the engine is built."""
        self._ends.start()

    def focus(self) -> None:
        """Start to record what is asked for, with operands. Peaks are reset."""
        self.follow()
        self.peaks = CudaPeaks(self.device)
        self._stop()
        self._num_unfocused = len(self._events)
        self._focused_messages = slice(len(self._ends.messages), None)
        self._start(operands=True)

    def rest(self) -> None:
        """Stop all but recording what the backend does, and what is left after each step."""
        self._stop_all()
        self._focused_messages = slice(self._focused_messages.start or 0, len(self._ends.messages))
        self._least_bytes = next(reversed(self.live_bytes().values()), None)
        self._rests = True

    def __exit__(self, *_: object) -> None:
        if not self._rests:
            self._stop_all()
        self._ends.stop()
        if torch.distributed.is_initialized() and fake_world.issued() is None:
            self._recorded = dump()

    def _stop_all(self) -> None:
        self._stop()
        if self.device.type == "cuda":
            self._log = stop_log(self.device)

    def _start(self, *, operands: bool) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=operands)
        self._profile.start()

    def _stop(self) -> None:
        self._profile.stop()
        results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        stack, events = list(results.experimental_event_tree()), []
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            events.append(event)
        self._events += sorted(events, key=lambda event: event.start_time_ns)

    @contextlib.contextmanager
    def window(self, name: str, step: int) -> Iterator[None]:
        """Mark what runs inside as a window, synchronised with the device on both sides."""
        self._synchronize()
        if not self._rests:
            self.peaks.reset()
        start = time.time_ns()
        try:
            yield
        finally:
            self._synchronize()
            if not self._rests:
                self.peaks.read()
            self.windows.append(Window(name=name, step=step, start_ns=start, stop_ns=time.time_ns()))
        self._clock.check()

    def settle(self, step: int) -> None:
        """Mark the steady point after `step`, when none of its work is pending."""
        self.steady_ns[step] = settle(self.device)
        if self._rests:
            self._rested_bytes[step] = self._settled_bytes()

    def _settled_bytes(self) -> int:
        """Return the allocator's count.

        If it is higher than before, the backend's threads get more time to release memory. They are slow on a busy
        machine, whereas a leak remains however long the wait.
        """
        found = allocated_bytes(self.device)
        for _ in range(_MOST_LOOKS):
            if self._least_bytes is None or found <= self._least_bytes:
                break
            settle(self.device)
            found = allocated_bytes(self.device)
        self._least_bytes = found if self._least_bytes is None else min(found, self._least_bytes)
        return found

    def live_bytes(self) -> dict[int, int]:
        """Return the allocator's count after each step."""
        changes = [event for event in self._events if event.name == "[memory]"]
        changes = [event for event in changes if event.extra_fields.device.type == self.device.type]
        times = [event.start_time_ns for event in changes]
        found = dict(self._rested_bytes)
        for step, time_ns in self.steady_ns.items():
            place = bisect.bisect_right(times, time_ns)
            if step not in found and place:
                found[step] = changes[place - 1].extra_fields.total_allocated
        return dict(sorted(found.items()))

    def forget(self, step: int) -> None:
        """Discard the windows and peaks of a step that is repeated."""
        self.peaks = CudaPeaks(self.device)
        self.windows = [window for window in self.windows if window.step != step]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def changes(self) -> list[Change]:
        """Return every allocation on the watched device and every end that was seen, in order."""
        events = [event for event in self._events if _is_memory(event, self.device)]
        kept = _kept_by_cublas(events, sorted(self.steady_ns.values())) if self.device.type == "cuda" else set()
        found = [
            Change(
                time_ns=event.start_time_ns,
                address=event.extra_fields.ptr,
                num_bytes=event.extra_fields.alloc_size,
                total_bytes=event.extra_fields.total_allocated,
                thread=event.start_tid,
                kernel=_kernel(event.parent),
                is_workspace=i in kept,
            )
            for i, event in enumerate(events)
        ]
        return with_unseen(found, self._log) if self._log else found

    def backward_starts(self) -> list[int]:
        """Return when autograd began to walk a graph: at its first node after anything else on the same level."""
        starts: list[int] = []
        walking: dict[int, bool] = {}
        for event in self._events:
            if event.name == "[memory]":
                continue
            level, is_node = id(event.parent), event.name.startswith(_AUTOGRAD_NODE)
            if is_node and not walking.get(level):
                starts.append(event.start_time_ns)
            walking[level] = is_node
        return starts

    def requested(self) -> list[AskedOperation]:
        """Return every collective and point-to-point call from `focus` to `rest`, in order.

        Point-to-point calls that cannot be paired with their ends, in order, have no ranks.
        """
        seen = self._events[self._num_unfocused :]
        events = [event for event in seen if event.name.startswith("c10d::")]
        num_messages = sum(event.name in POINT_TO_POINT for event in events)
        told = [message.ranks for message in self._ends.messages[self._focused_messages]]
        ends = iter(told if num_messages == len(told) else [()] * num_messages)
        done = _when_done(events, [event for event in seen if event.name.startswith(_BACKEND_EVENT)])
        return [
            AskedOperation(
                name=event.name,
                time_ns=event.start_time_ns,
                operands=tuple(tuple(_operands(argument)) for argument in event.extra_fields.inputs),
                ranks=next(ends) if event.name in POINT_TO_POINT else (),
                done_ns=done_ns,
            )
            for event, done_ns in zip(events, done, strict=True)
        ]

    def messages(self) -> list[Message]:
        """Return every point-to-point call since `follow`, in order."""
        return self._ends.messages

    @property
    def recorded_since_ns(self) -> int:
        """Time of the flight recorder's oldest entry if older ones were dropped, otherwise 0."""
        entries = self._recorded.get("entries", [])
        return entries[0]["time_created_ns"] if entries and entries[0].get("record_id", 0) else 0

    def issued(self) -> list[IssuedOperation]:
        """Return every collective (not point-to-point) that the backend performed, in order."""
        if (found := fake_world.issued()) is not None:
            return found
        # The recorder's own table of groups has no names on gloo.
        names = torch.distributed.distributed_c10d._world.pg_names
        ranks = {str(name): tuple(sorted(torch.distributed.get_process_group_ranks(g))) for g, name in names.items()}
        return list(issued_operations(self._recorded.get("entries", []), ranks))


def _when_done(asked: Sequence[Any], backend: Sequence[Any]) -> list[int | None]:
    """Return when the backend was done with each call, or None.

    The backend's events, one per collective, begin in the order of the calls and end in its threads. Messages have
    none.
    """
    events, found = iter(backend), list[int | None]()
    event = next(events, None)
    for i, call in enumerate(asked):
        before = asked[i + 1].start_time_ns if i + 1 < len(asked) else None
        while event and event.start_time_ns < call.start_time_ns:
            event = next(events, None)
        begun = event is not None and (before is None or event.start_time_ns < before)
        found.append(event.end_time_ns if event and begun else None)
    return found


def _is_memory(event: Any, device: torch.device) -> bool:  # noqa: ANN401
    return bool(event.name == "[memory]" and event.extra_fields.device.type == device.type)


def _kept_by_cublas(events: Sequence[Any], cleared_ns: Sequence[int]) -> set[int]:
    """Return which of these allocations are cuBLAS's workspaces.

    It is the last allocation of exactly that size in a thread's first product since they were cleared. A product's
    result, which may have the same size, is allocated before.
    """
    size = cublas_workspace_bytes(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for i, event in enumerate(events):
        started = _kernel(event.parent) if size and event.extra_fields.alloc_size == size else None
        if started is None:
            continue
        place = event.start_tid, bisect.bisect_right(cleared_ns, event.start_time_ns)
        if place not in found or found[place][0] == started:
            found[place] = started, i
    return {i for _, i in found.values()}


def _kernel(operator: Any) -> int | None:  # noqa: ANN401
    """Return the start time of the kernel that made a change, directly or through an operator it calls, or None."""
    while operator is not None and operator.name not in _KERNELS:
        operator = operator.parent if operator.name in _ALLOCATING else None
    return operator.start_time_ns if operator is not None else None


def _operands(argument: Any) -> Iterator[Operand]:  # noqa: ANN401
    """Yield the tensors inside one argument of a recorded operator."""
    if isinstance(argument, list | tuple):
        for part in argument:
            yield from _operands(part)
    elif hasattr(argument, "storage_data_ptr"):
        count = 1
        for size in argument.sizes:
            count *= size
        yield Operand(num_bytes=count * argument.dtype.itemsize, address=argument.storage_data_ptr or 0)
