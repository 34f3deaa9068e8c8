"""Exact bytes by category on one rank, steady and at the peak."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmark.adapter.holdings import Holdings, storage_bytes
from meshmark.measure.readings import Bytes, MemoryReading
from meshmark.measure.watch import Allocation, Watch, Window


@dataclass(frozen=True, kw_only=True)
class Named:
    """Addresses and sizes of storages that an engine named, by category."""

    parameters: dict[int, int]
    gradients: dict[int, int]
    optimizer_states: dict[int, int]
    communication: dict[int, int]

    @classmethod
    def of(cls, held: Holdings) -> Named:
        """Each storage counted once, under the first category that names it."""
        seen: set[int] = set()
        found = []
        for tensors in (held.parameters, held.gradients, held.optimizer_states, held.communication):
            own = {a: n for a, n in storage_bytes(tensors).items() if a not in seen}
            seen |= own.keys()
            found.append(own)
        return cls(parameters=found[0], gradients=found[1], optimizer_states=found[2], communication=found[3])

    @property
    def addresses(self) -> set[int]:
        return {
            a for part in (self.parameters, self.gradients, self.optimizer_states, self.communication) for a in part
        }

    def category(self, address: int) -> str | None:
        for name in ("parameters", "gradients", "optimizer_states", "communication"):
            if address in getattr(self, name):
                return name
        return None


def read_memory(
    watch: Watch,
    step: int,
    before_update: Named,
    after_update: Named,
    visible: set[int],
    allocator_peaks: tuple[int, int] | None,
) -> MemoryReading:
    """Memory of `step`, whose windows `watch` holds, with what the engine named before and after its update, the
    `visible_storages` after it, and what `cuda_peaks` said of it."""
    backward, update = (w for w in watch.windows if w.step == step)
    on_wire: dict[int, list[int]] = {}
    for operation in watch.asked():
        for operand in (o for argument in operation.operands for o in argument):
            on_wire.setdefault(operand.address, []).append(operation.time_ns)
    named = after_update.addresses | before_update.addresses
    lives = [_with_end(life, on_wire, named | visible, backward) for life in _one_at_a_time(watch.allocations())]
    lives = [life for life in lives if life.stop_ns is None or life.stop_ns > life.start_ns]
    peak_ns = _peak_time(lives, backward.start_ns, update.stop_ns)
    starts = [start for start in watch.backward_starts() if backward.holds(start)]

    def during(time_ns: int) -> Bytes:
        return _classify(lives, time_ns, before_update, on_wire, backward.start_ns, named_ns=backward.stop_ns)

    return MemoryReading(
        steady=_classify(lives, update.stop_ns, after_update, on_wire, step_start_ns=update.stop_ns),
        states=Bytes(
            parameters=sum(after_update.parameters.values()),
            gradients=sum(before_update.gradients.values()),
            optimizer_states=sum(after_update.optimizer_states.values()),
            communication=sum(before_update.communication.values()),
        ),
        peak=during(peak_ns),
        held=during(min(starts)) if starts else None,
        allocator_peak_bytes=allocator_peaks[0] if allocator_peaks else None,
        allocator_reserved_bytes=allocator_peaks[1] if allocator_peaks else None,
    )


def _one_at_a_time(lives: list[Allocation]) -> list[Allocation]:
    """A storage whose end was not seen is over when its address is given out again."""
    following: dict[int, int] = {}
    found = []
    for life in sorted(lives, key=lambda life: life.start_ns, reverse=True):
        if life.stop_ns is None and life.address in following:
            life = dataclasses.replace(life, stop_ns=following[life.address])
        following[life.address] = life.start_ns
        found.append(life)
    return found[::-1]


def _with_end(life: Allocation, on_wire: dict[int, list[int]], known: set[int], backward: Window) -> Allocation:
    """How long a storage lived whose end was not seen: for ever when the engine named it or Python still sees it, or
    when it went into a collective and is older than the step (a bucket, used again and again). Else gloo's thread had
    it last, which lets go when the collective is done: until its last collective, or not at all, for it was a
    collective's scratch of long ago."""
    if life.stop_ns is not None or life.address in known:
        return life
    uses = [t for t in on_wire.get(life.address, []) if t >= life.start_ns]
    if uses and life.start_ns < backward.start_ns:
        return life
    return dataclasses.replace(life, stop_ns=max(uses) + 1 if uses else life.start_ns)


def visible_storages() -> set[int]:
    """Addresses of all storages that Python code can still reach."""
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    addresses = set()
    for tensor in found:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a wrapper around other tensors has no storage
            addresses.add(tensor.untyped_storage().data_ptr())
    return addresses


def cuda_peaks(device: torch.device) -> tuple[int, int] | None:
    """Bytes allocated and reserved at most since the last reset; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _peak_time(allocations: list[Allocation], start_ns: int, stop_ns: int) -> int:
    """The first instant in [start, stop) when most bytes are alive."""
    changes = [(a.start_ns, a.num_bytes) for a in allocations]
    changes += [(a.stop_ns, -a.num_bytes) for a in allocations if a.stop_ns is not None]
    alive = peak = 0
    peak_ns = start_ns
    for time_ns, change in sorted(changes):
        if time_ns >= stop_ns:
            break
        if time_ns >= start_ns and alive > peak:  # what was alive when the step began counts too
            peak, peak_ns = alive, max(start_ns, peak_ns)
        alive += change
        if time_ns >= start_ns and alive > peak:
            peak, peak_ns = alive, time_ns
    return peak_ns


def _classify(
    allocations: list[Allocation],
    time_ns: int,
    named: Named,
    on_wire: dict[int, list[int]],
    step_start_ns: int,
    named_ns: int | None = None,
) -> Bytes:
    """Bytes alive at `time_ns`, by category. `on_wire`: when each address went into a collective. `named_ns`: when
    storages were named, if not now: what had an address before, or has it since, has not the name."""
    totals: dict[str, int] = {}
    for life in allocations:
        if not life.alive(time_ns):
            continue
        category = named.category(life.address) if life.alive(time_ns if named_ns is None else named_ns) else None
        if category is None and any(life.alive(t) for t in on_wire.get(life.address, [])):
            category = "communication"
        if category is None:
            category = "activations" if life.start_ns >= step_start_ns else "other"
        totals[category] = totals.get(category, 0) + life.num_bytes
    return Bytes(**totals)
