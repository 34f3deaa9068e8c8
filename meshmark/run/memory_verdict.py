"""Judges memory: everything that the allocator counted, and each category that an engine names, against the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshmark.measure.interval import Interval, mean_interval
from meshmark.measure.readings import MemoryReading
from meshmark.records.record import Record, Verdict
from meshmark.reference.build import parameter_shapes
from meshmark.spec.own_model import OwnModelConfig
from meshmark.theory.states import ExtraMemory, ModelStates, declared_bytes, declared_peak
from meshmark.theory.traffic import METERED_STEP

STATE_TOLERANCE = 0.01
"""Relative, on the bytes of each category of model states, of activations, and of the allocator's totals."""
SCALARS_BYTES = {"cpu": 1024, "cuda": 4096}
"""Beside it, of totals: loss, norm, scale and a few counts, which nobody names. More is a tensor. On a GPU each takes a
block of 512 bytes; engines here hold two to four."""
LEAK_BYTES = {"cpu": 64, "cuda": 512}
"""Growth a step that is not judged: a few scalars, which take a block of 512 bytes each on a GPU. Correct engines grow
by nothing at all from the metered step on."""
LOSS_BYTES = 256
"""Beside activations that were counted in a pass of one process: the engine's own loss, its share and what scales it,
which are no part of the module. Frameworks here hold 32 to 52 bytes of these."""
COUNT_BYTES = 4
"""PyTorch's optimizers count the steps of every tensor."""
TOTALS = ("steady", "peak", "unnamed", "growth")
"""Totals of the allocator's count.

They are the bytes after a step, the maximum, the bytes before the step without a name, and the growth from one step to
the next.
"""

_MEND_STATES = (
    "`Engine.holdings` leaves storages out or names too many, or the framework holds other bytes than its layout "
    "promises; what it is meant to hold besides goes into `Adapter.extra_memory`"
)
_MEND_ACTIVATIONS = (
    "what the framework is meant to keep follows from `Adapter.recipe`, and what is over from `Adapter.extra_memory`"
)
_MEND_MORE = (
    "the allocator counts bytes that are in no plan: first see whether they grow with depth (`--model layers=8`), with "
    "micro-batches (`--layouts`) or with steps (`--endurance`). What grows is kept for too long, which the framework "
    "is to mend. Only a size that follows from its algorithm goes into `Adapter.extra_memory`, with the reason"
)
_MEND_GROWTH = (
    "memory grows from step to step, which no declaration covers: find out what the framework keeps, for example with "
    "`gc.get_objects()` after two steps, or `torch.cuda.memory_snapshot()`"
)
_MEND_LESS = (
    "the allocator counts fewer bytes than are planned: what the framework is meant to do without follows from "
    "`Adapter.recipe`, or is a negative size in `Adapter.extra_memory` with its reason"
)

_UNKNOWN = (
    "activations and peak, which are not known, for the meter could not tell in its bounded time which storages "
    "another thread had freed"
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A measured number of one rank, with its plan."""

    category: str
    rank: int
    measured: float
    planned: float
    late: float = 0.0
    """So much of what was measured may have been gone, had a backend's threads been quick, or not yet come."""
    step: int | None = None
    """After which it was measured; None: at the metered step."""
    interval: Interval | None = None
    """Interval of the growth per step, if several steps give it."""
    spare: int = 0
    """Bytes beyond the plan that may be scalars."""

    @property
    def is_below(self) -> bool:
        return self.measured < self.planned

    @property
    def deviation(self) -> float:
        """All of it, relative to the plan."""
        return (self.measured - self.planned) / max(self.planned, 1.0)

    @property
    def error(self) -> float:
        """Relative to the plan, of what neither late buffers nor (of totals) scalars account for."""
        beyond = max(self.measured - self.late - self.planned, self.planned - self.measured, 0.0)
        return max(beyond - self.spare, 0.0) / max(self.planned, 1.0)

    @property
    def where(self) -> str:
        after = f", {_after(self.step)}" if self.step is not None else ""
        return f"{self.category} on rank {self.rank}{after}"

    @property
    def smallest_detectable(self) -> float:
        """Bytes more than were measured that would have failed."""
        if self.interval:
            return self.spare + self.interval.half_width
        return self.spare + self.late + STATE_TOLERANCE * max(self.planned, 1.0)


def _after(step: int) -> str:
    return f"after step {step}"


def judge_memory(record: Record) -> Verdict | None:
    """On every rank, within 1 % of the closed form plus what the adapter declares: bytes of parameters, gradients,
    optimizer states and, where they are planned, activations; and all that the allocator counted, after the step and
    (where it is planned) at the peak. Nothing may grow from step to step. None where nothing is planned."""
    if "memory" in record.unmeasured:
        return Verdict(suite="memory", passed=False, summary=record.unmeasured["memory"])
    found: list[Held] = []
    device = record.environment.device
    on_cpu = device == "cpu"
    scalars, planned = _scalars(record), True
    for i, (reading, plan, declared) in enumerate(
        zip(record.memory.readings, record.memory.planned, record.memory.extra_memory, strict=True)
    ):
        rank, live = record.ranks[i], record.memory.live_bytes[i] if record.memory.live_bytes else {}
        growth = _growth(rank, live, LEAK_BYTES[device])
        found += [growth] if growth else []
        if plan is None:
            planned = False
            continue
        found += [
            Held(category=name, rank=rank, measured=measured, planned=planned, late=scalars.get(name, 0))
            for name, measured, planned in memory_categories(reading, plan, declared, with_activations=on_cpu)
        ]
        totals = list(memory_totals(rank, reading, plan, declared, on_cpu=on_cpu))
        found += [held for held in totals if not growth or held.category != growth.category]
        found += _later(totals, live)
    if not planned and all(held.error <= STATE_TOLERANCE for held in found):
        return None
    worst = max(found, key=lambda held: held.error)
    relative = f"({worst.error:.2%})" if worst.planned else ""
    summary = f"{worst.where}: {worst.measured:,.0f} bytes, planned {worst.planned:,.0f} {relative}".rstrip()
    if worst.interval:
        summary = f"{worst.where}: {_growth_text(worst.interval)}, planned none"
    if all(plan is None or plan.activations is None for plan in record.memory.planned):
        summary += "; activations: not planned"
    if unknown := [record.ranks[i] for i, reading in enumerate(record.memory.readings) if not reading.ends_known]:
        summary += f" (not judged on {_ranks(unknown)}: {_UNKNOWN})"
    passed = worst.error <= STATE_TOLERANCE
    return Verdict(
        suite="memory",
        passed=passed,
        summary=summary if passed else f"{summary}; {_mend(worst)}",
        evidence=_evidence(worst, found, record),
    )


def _growth(rank: int, live: Mapping[int, int], spare: int) -> Held | None:
    """How much more a rank holds after each step than after the one before, from the metered step on; None where fewer
    than two steps tell.

    The interval is that of the mean of these differences. What comes once and stays widens it, and is judged by
    `_later`; what comes in every step does not.
    """
    steps = sorted(step for step in live if step >= METERED_STEP)
    if len(steps) < 3:
        return None
    interval = mean_interval([float(live[b] - live[a]) for a, b in itertools.pairwise(steps)])
    lowest = max(interval.mean - interval.half_width, 0.0)
    return Held(category="growth", rank=rank, measured=lowest, planned=0.0, interval=interval, spare=spare)


def _growth_text(interval: Interval) -> str:
    return f"{interval.mean:,.0f} ± {interval.half_width:,.0f} bytes a step"


def _later(totals: Sequence[Held], live: Mapping[int, int]) -> Iterator[Held]:
    """Yield what was held after other steps than the metered one. Less is no fault, because the plan is for a step
    that has all.
    """
    steady = next((held for held in totals if held.category == "steady"), None)
    if steady is None or METERED_STEP not in live:
        return
    for step, num_bytes in live.items():
        if step != METERED_STEP and num_bytes > live[METERED_STEP]:
            yield replace(steady, step=step, measured=steady.measured + num_bytes - live[METERED_STEP])


def _scalars(record: Record) -> dict[str, int]:
    """Return bytes of scalars by category that 1 % need not cover: those of a user's own model, which may be of any
    size, and those of one shard of hundreds in a fake world."""
    model = record.case.workload.model
    scalars: dict[str, int] = {}
    if record.fake_ranks:
        scalars["optimizer_states"] = COUNT_BYTES * len(parameter_shapes(model))
    if isinstance(model, OwnModelConfig):
        scalars |= {"activations": LOSS_BYTES, "optimizer_states": COUNT_BYTES * model.num_tensors}
    return scalars


def _mend(worst: Held) -> str:
    """Return advice on a number that is off, depending on the direction."""
    if worst.category == "growth":
        return _MEND_GROWTH
    if worst.category in TOTALS:
        return _MEND_LESS if worst.is_below else _MEND_MORE
    return _MEND_ACTIVATIONS if worst.category == "activations" else _MEND_STATES


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _evidence(worst: Held, found: Sequence[Held], record: Record) -> dict[str, float | int | str]:
    memory = record.memory
    evidence: dict[str, float | int | str] = {
        "category": worst.category,
        "rank": worst.rank,
        "measured_bytes": worst.measured,
        "planned_bytes": worst.planned,
        "relative_error": worst.error,
        "tolerance": STATE_TOLERANCE,
        "declared": "; ".join(sorted({r.reason for own in memory.extra_memory for r in own})),
        "workspace_bytes": max(reading.workspace_bytes for reading in memory.readings),
        "not_known_ranks": " ".join(
            str(record.ranks[i]) for i, reading in enumerate(memory.readings) if not reading.ends_known
        ),
    }
    for name in TOTALS:
        if ranks := [held for held in found if held.category == name]:
            held = max(ranks, key=lambda held: (held.error, held.measured))
            evidence |= {f"{name}_rank": held.rank, f"{name}_bytes": held.measured, f"{name}_planned": held.planned}
            evidence |= {f"{name}_late": held.late} if held.late else {}
    if steady := [held for held in found if held.category == "steady"]:
        evidence["smallest_buffer_bytes"] = max(held.smallest_detectable for held in steady)
    if grown := [held for held in found if held.category == "growth"]:
        evidence["smallest_leak_bytes"] = max(held.smallest_detectable for held in grown)
    evidence["steps"] = len(memory.live_bytes[0]) if memory.live_bytes else 1
    return evidence


def memory_categories(
    reading: MemoryReading, plan: ModelStates, declared: Sequence[ExtraMemory], *, with_activations: bool
) -> Iterator[tuple[str, float, float]]:
    """Category, measured and expected bytes. Activations are those that PyTorch's operators save on a CPU, whose memory
    is the host's; they are left out where the meter does not know which storages had ended."""
    plan = plan.with_host() if with_activations else plan
    for name in ("parameters", "gradients", "optimizer_states"):
        yield name, getattr(reading.states, name), getattr(plan, name) + declared_bytes(declared, name)
    if with_activations and reading.ends_known and reading.held is not None and plan.activations is not None:
        yield "activations", reading.held.activations, plan.activations + declared_bytes(declared, "activations")


def memory_totals(
    rank: int, reading: MemoryReading, plan: ModelStates, declared: Sequence[ExtraMemory], *, on_cpu: bool
) -> Iterator[Held]:
    """Yield the allocator's totals with their plan.

    The batch passed to the engine is not the engine's, and its measured size is left out. Workspaces of kernels are
    left out too, because no storage outlives them. Peaks are planned for a CPU's kernels only. Without the ends of
    storages it is unknown which buffers at the peak were late, and which bytes had a name.
    """
    steady, peak = reading.steady, reading.peak
    passing = declared_bytes(declared, "unnamed")  # which may be there after a step as well, and not after another
    plan = plan.with_host() if on_cpu else plan
    spare = SCALARS_BYTES["cpu" if on_cpu else "cuda"]
    yield Held(
        category="steady",
        rank=rank,
        measured=steady.total - steady.inputs - reading.rounding_bytes,
        planned=plan.parameters
        + plan.optimizer_states
        + plan.buffers
        + plan.tables
        + declared_bytes(declared, "steady"),
        late=passing,
        spare=spare,
    )
    planned = declared_peak(plan, declared) if on_cpu else None
    if not reading.ends_known:
        pass
    elif planned is not None:
        yield Held(
            category="peak",
            rank=rank,
            measured=peak.total - peak.inputs,
            planned=planned + plan.tables,
            late=reading.late_bytes,
            spare=spare,
        )
    else:
        # What a framework does without had a name. At most: an engine may name what is declared.
        lasting = (max(r.num_bytes, 0.0) for r in declared if r.category in ("steady", "unnamed"))
        unnamed = plan.tables + sum(lasting)
        measured = max(peak.other, unnamed)
        yield Held(category="unnamed", rank=rank, measured=measured, planned=unnamed, spare=spare)
    if reading.previous_steady_bytes is not None:
        growth = max(steady.total - reading.previous_steady_bytes, 0)
        yield Held(category="growth", rank=rank, measured=growth, planned=0.0, late=passing, spare=spare)
