"""Exact bytes by category on one rank, in the steady state and at the peak. Totals are the allocator's own count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from meshmark.adapter.holdings import Holdings, storage_bytes
from meshmark.measure.allocations import Allocation, Held, Timeline, timeline
from meshmark.measure.readings import Bytes, MemoryReading
from meshmark.measure.watch import AskedOperation, Watch

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
    held = Held(time_ns=backward.stop_ns, num_bytes=before_update.addresses)
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
