"""Meters of one step on one rank: exact bytes by category, and collectives.

PyTorch's profiler sees every allocation of the c10 allocators (exact bytes, also from C++) and every collective that
was asked for. The flight recorder has what the backend issued for it and in which group. Neither sees the
point-to-point calls of gloo with their group, so these are recorded where `torch.distributed` makes them. Bytes are
those held in the steady state and at the peak; totals are the allocator's own count.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshmark.adapter.engine import Holdings, TrafficSource, Transfer, storage_bytes
from meshmark.errors import TrafficError
from meshmark.measure import fake_world
from meshmark.measure.allocations import (
    Allocation,
    Change,
    CudaPeaks,
    HeldStorages,
    Logged,
    Timeline,
    allocated_bytes,
    count_all_threads,
    cublas_workspace_bytes,
    settle,
    start_log,
    stop_log,
    timeline,
    with_unseen,
)
from meshmark.measure.flight_recorder import IssuedOperation, dump, issued_operations
from meshmark.measure.laps import SteadyClock
from meshmark.measure.readings import AlikeSteps, Bytes, Collective, MemoryReading, TrafficReading

# --- Watch this process's allocations and collectives through PyTorch's profiler and flight recorder.

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
        if torch.distributed.is_initialized() and not fake_world.ISSUED:
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
        if fake_world.ISSUED:
            return fake_world.ISSUED[-1]
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


# --- Collectives of one step on one rank: those that were asked for, and those that the backend issued.

# The argument of a c10d call with the tensors that count, and whether these are one rank's part of the whole.
_ASKED: dict[str, tuple[str, int, bool]] = {
    "allreduce_": ("all_reduce", 0, False),
    "allreduce_coalesced_": ("all_reduce", 0, False),
    "allgather_": ("all_gather", 1, True),
    "_allgather_base_": ("all_gather", 0, False),
    "allgather_coalesced_": ("all_gather", 1, True),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, False),
    "reduce_scatter_": ("reduce_scatter", 0, True),
    "_reduce_scatter_base_": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, False),
    "broadcast_": ("broadcast", 0, False),
    "reduce_": ("reduce", 0, False),
    "alltoall_": ("all_to_all", 1, False),
    "alltoall_base_": ("all_to_all", 1, False),
    "gather_": ("gather", 1, True),
    "scatter_": ("scatter", 0, True),
    "send": ("send", 0, False),
    "recv_": ("recv", 0, False),
    "recv_any_source_": ("recv", 0, False),
    "barrier": ("barrier", 0, False),
}


class TorchTraffic:
    """Traffic through `torch.distributed`: the traffic source that every rank has."""

    def __init__(self, watch: Watch) -> None:
        """`watch` must be in focus while this counts, and over before results are read."""
        self._watch, self._start_ns = watch, 0
        self._stretches: list[tuple[int, int]] = []

    def start(self) -> None:
        self._start_ns = time.time_ns()

    def stop(self) -> None:
        self._stretches.append((self._start_ns, time.time_ns()))

    def requested(self) -> list[Transfer]:
        """Return the transfers that were asked for.

        Raises `TrafficError` when asked and issued collectives cannot be paired in order, or a call or its group is
        unknown. Partial results are not returned.
        """
        asked, issued = self._operations()
        if gone := [i.kind for i in issued if not i.ranks]:
            raise TrafficError(f"{', '.join(gone)} used a process group that was destroyed before the step ended")
        return _paired([a for a in asked if a.name not in POINT_TO_POINT], issued) + _point_to_point(asked)

    def issued(self) -> list[Transfer]:
        """Return the transfers that were issued.

        Raises `TrafficError` when the flight recorder had too little room.
        """
        since = self._watch.recorded_since_ns
        if any(start < since for start, _ in self._stretches):
            raise TrafficError("the flight recorder had no room for all collectives; TORCH_FR_BUFFER_SIZE is too small")
        messages = [m for m in self._watch.messages() if self._counts(m.time_ns)]
        sent = [Transfer(kind=m.kind, ranks=m.ranks, num_bytes=m.num_bytes) for m in messages]
        return [_issued(i) for i in self._watch.issued() if self._counts(i.time_ns)] + sent

    def _operations(self) -> tuple[list[AskedOperation], list[IssuedOperation]]:
        asked = [a for a in self._watch.requested() if self._counts(a.time_ns)]
        return asked, [i for i in self._watch.issued() if self._counts(i.time_ns)]

    def _counts(self, time_ns: int) -> bool:
        return any(start <= time_ns < stop for start, stop in self._stretches)


def read_traffic(sources: Sequence[TrafficSource]) -> TrafficReading:
    """Return the traffic of all `sources`."""
    return TrafficReading(
        asked=sum_transfers(t for source in sources for t in source.requested()),
        issued=sum_transfers(t for source in sources for t in source.issued()),
    )


def alike_steps(sources: Sequence[Sequence[TrafficSource]]) -> list[AlikeSteps]:
    """Group steps by what was issued in them. `sources` are by step, from the first. Raises `TrafficError`."""
    found: list[AlikeSteps] = []
    for step, own in enumerate(sources):
        issued = sum_transfers(t for source in own for t in source.issued())
        same = next((group for group in found if group.issued == issued), None)
        if same:
            same.steps.append(step)
        else:
            found.append(AlikeSteps(steps=[step], issued=issued))
    return found


def _paired(asked: Sequence[AskedOperation], issued: Sequence[IssuedOperation]) -> list[Transfer]:
    """Pair asked and issued collectives one by one, in order.

    If more were issued than asked for, the rest was asked for by a callback on a backend thread, which the profiler
    does not follow (as for PowerSGD's hook). For these, only the issued operation is known.
    """
    left, found, more = list(asked), list[Transfer](), len(issued) > len(asked)
    for operation in issued:
        own = transfer_of(left[0], operation.ranks) if left else None
        if own and more and (own.kind, own.num_bytes) != (operation.kind, operation.num_bytes):
            own = None
        if own:
            left.pop(0)
        found.append(own or _issued(operation))
    if left:
        raise TrafficError(
            f"{len(asked)} collectives asked for, {len(issued)} in the flight recorder: "
            f"{[a.name for a in asked]} against {[i.kind for i in issued]}"
        )
    return found


def _point_to_point(asked: Iterable[AskedOperation]) -> list[Transfer]:
    messages = [a for a in asked if a.name in POINT_TO_POINT]
    if any(not a.ranks for a in messages):
        raise TrafficError(f"{len(messages)} sends and receives, whose ends were not all seen")
    return [transfer_of(a, a.ranks) for a in messages]


def transfer_of(operation: AskedOperation, ranks: tuple[int, ...]) -> Transfer:
    """Return what `operation` sends among `ranks`. Raises `TrafficError` for an unknown call."""
    return Transfer(kind=_meaning(operation)[0], ranks=ranks, num_bytes=_full_bytes(operation, len(ranks)))


def _meaning(operation: AskedOperation) -> tuple[str, int, bool]:
    name = operation.name.removeprefix("c10d::")
    if name not in _ASKED:
        raise TrafficError(f"the call {operation.name} is unknown to Meshmark; add what it sends to `_ASKED`")
    return _ASKED[name]


def _full_bytes(operation: AskedOperation, group_size: int) -> int:
    kind, argument, partial = _meaning(operation)
    if kind == "barrier":
        return 0
    return sum(o.num_bytes for o in operation.operands[argument]) * (group_size if partial else 1)


def _issued(operation: IssuedOperation) -> Transfer:
    num_bytes = 0 if operation.kind == "barrier" else operation.num_bytes
    return Transfer(kind=operation.kind, ranks=operation.ranks, num_bytes=num_bytes)


def sum_transfers(transfers: Iterable[Transfer]) -> list[Collective]:
    """Add up transfers by kind and ranks. A group of one moves nothing and is left out."""
    counts: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for transfer in transfers:
        if len(transfer.ranks) > 1:
            key = transfer.kind, transfer.ranks
            count, total = counts.get(key, (0, 0))
            counts[key] = (count + 1, total + transfer.num_bytes)
    return [
        Collective(kind=kind, group_size=len(ranks), ranks=ranks, count=count, num_bytes=total)
        for (kind, ranks), (count, total) in sorted(counts.items())
    ]


# --- Exact bytes by category on one rank, in the steady state and at the peak. Totals are the allocator's own count.

_NAMES = ("parameters", "gradients", "optimizer_states", "communication", "inputs")


@dataclass(frozen=True, kw_only=True)
class Named:
    """Addresses and sizes of storages that have a name, by category."""

    parameters: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    optimizer_states: dict[int, int] = field(default_factory=dict)
    communication: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    """The global batch that the engine receives."""

    @classmethod
    def of(cls, held: Holdings, inputs: Iterable[Tensor] = ()) -> Named:
        """Return the named storages. Each counts once, in the first category that names it."""
        seen: set[int] = set()
        found = {}
        parts = (held.parameters, held.gradients, held.optimizer_states, held.communication, inputs)
        for name, tensors in zip(_NAMES, parts, strict=True):
            found[name] = {a: n for a, n in storage_bytes(tensors).items() if a not in seen}
            seen |= found[name].keys()
        return cls(**found)

    @property
    def addresses(self) -> dict[int, int]:
        return {a: n for name in _NAMES for a, n in getattr(self, name).items()}

    def category(self, address: int) -> str | None:
        return next((name for name in _NAMES if address in getattr(self, name)), None)


OnWire = dict[int, list[int]]
"""Times at which each address went into a collective."""


def read_memory(watch: Watch, step: int, before_update: Named, after_update: Named) -> MemoryReading:
    """Return the memory of `step`, from the windows of `watch` and the names before and after the update."""
    backward, update = (w for w in watch.windows if w.step == step)
    on_wire, asked = OnWire(), watch.requested()
    for operation in asked:
        for address in operation.addresses:
            on_wire.setdefault(address, []).append(operation.time_ns)
    held = HeldStorages(time_ns=backward.stop_ns, num_bytes=before_update.addresses)
    found = timeline(watch.changes(), known=frozenset(after_update.addresses), held=held)
    steady_ns = watch.steady_ns[step]
    peak_bytes, peak_ns = max((found.peak(w.start_ns, w.stop_ns) for w in (backward, update)), key=lambda peak: peak[0])
    starts = [start for start in watch.backward_starts() if backward.contains(start)]

    def during(time_ns: int) -> Bytes:
        return _classify(found, time_ns, before_update, on_wire, backward.start_ns, named_ns=backward.stop_ns)

    sizes = after_update.addresses
    previous_ns = watch.steady_ns.get(step - 1)
    return MemoryReading(
        steady=_classify(found, steady_ns, after_update, on_wire, step_start_ns=steady_ns),
        states=Bytes(
            parameters=sum(after_update.parameters.values()),
            gradients=sum(before_update.gradients.values()),
            optimizer_states=sum(after_update.optimizer_states.values()),
            communication=sum(before_update.communication.values()),
        ),
        peak=during(peak_ns),
        held=during(min(starts)) if starts else None,
        workspace_bytes=max(found.peak_with_workspaces(w.start_ns, w.stop_ns) for w in (backward, update)) - peak_bytes,
        late_bytes=sum(life.num_bytes for life in found.lives if _is_late(life, peak_ns, asked)),
        previous_steady_bytes=None if previous_ns is None else found.total(previous_ns),
        rounding_bytes=sum(
            life.num_bytes - sizes[life.address]
            for life in found.lives
            if life.address in sizes and life.alive(steady_ns)
        ),
        allocator_peak_bytes=watch.peaks.allocated or None,
        allocator_reserved_bytes=watch.peaks.reserved or None,
        ends_known=found.ends_known,
    )


def _is_late(life: Allocation, time_ns: int, asked: Sequence[AskedOperation]) -> bool:
    """Return whether a storage may only still exist because of the backend's thread.

    That is the case if this thread freed it, and the last collective that used it, or made it as a copy, was already
    done. With a fast thread, it would be gone as soon as the framework releases it.
    """
    if not life.freed_elsewhere or not life.alive(time_ns):
        return False
    done = [
        call.done_ns or call.time_ns
        for call in asked
        if (life.alive(call.time_ns) and life.address in call.addresses)
        or call.time_ns <= life.start_ns <= (call.done_ns or call.time_ns)
    ]
    return bool(done) and max(done) <= time_ns


def _classify(
    found: Timeline,
    time_ns: int,
    named: Named,
    on_wire: OnWire,
    step_start_ns: int,
    named_ns: int | None = None,
) -> Bytes:
    """Return the bytes that the allocator counted at `time_ns`, by category. Bytes of no known storage are `other`.

    `named_ns` is when storages were named, if not now. Storages that had an address before or after that time do not
    have its name.
    """
    totals: dict[str, int] = {}
    for life in found.lives:
        if not life.alive(time_ns):
            continue
        category = named.category(life.address) if life.alive(time_ns if named_ns is None else named_ns) else None
        if category is None and any(life.alive(t) for t in on_wire.get(life.address, [])):
            category = "communication"
        if category is None and life.is_workspace:
            category = "workspaces"
        if category is None:
            category = "activations" if life.start_ns >= step_start_ns else "other"
        totals[category] = totals.get(category, 0) + life.num_bytes
    listed = Bytes(**totals)
    return dataclasses.replace(listed, other=listed.other + found.total(time_ns) - listed.total)


# --- Record point-to-point calls of this process.

_KINDS_OF_ENDS = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
"""Methods of a process group that `torch.distributed` sends and receives through, with the kinds of their calls."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One point-to-point call."""

    kind: str
    ranks: tuple[int, ...]
    """Both ends, or the whole group if a receive accepts any rank."""
    num_bytes: int
    time_ns: int


class Ends:
    """Records every point-to-point call of this process between `start` and `stop`, in order."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._kept: dict[str, object] = {}
        """Original class attributes. `getattr` would return them in a form that no longer binds to a group."""

    def start(self) -> None:
        if self._kept or not dist.is_available() or not dist.is_initialized():
            return
        for name, kind in _KINDS_OF_ENDS.items():
            self._kept[name] = vars(dist.ProcessGroup)[name]
            noting = self._noting(getattr(dist.ProcessGroup, name), kind, names_peer=name != "recv_anysource")
            setattr(dist.ProcessGroup, name, noting)

    def stop(self) -> None:
        for name, method in self._kept.items():
            setattr(dist.ProcessGroup, name, method)
        self._kept = {}

    def _noting(self, method: Callable[..., Any], kind: str, *, names_peer: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def noting(group: dist.ProcessGroup, *arguments: Any) -> Any:  # noqa: ANN401
            ranks = dist.get_process_group_ranks(group)
            # Arguments are the tensors, the peer's place in the group, and a tag.
            ends = {dist.get_rank(), ranks[arguments[1]]} if names_peer else ranks
            self.messages.append(
                Message(
                    kind=kind,
                    ranks=tuple(sorted(ends)),
                    num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in arguments[0]),
                    time_ns=time.time_ns(),
                )
            )
            return method(group, *arguments)

        return noting
