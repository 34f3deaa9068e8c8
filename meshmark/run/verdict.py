"""Judge a record: its training against the truth, its memory and traffic against the plan, and its timed steps.

All functions here are pure, so that a record on disk can be judged again. Memory is judged by the allocator's totals
and by each category that an engine names. Traffic must match theory, with the adapter's exceptions, to the byte.
Barriers are counted and reported but fail no case, because they carry no data and no plan has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshmark.adapter.contract import Adapter
from meshmark.errors import MeshmarkError
from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind
from meshmark.judge.faults import Fault
from meshmark.judge.tolerance_model import (
    MULTIPLES,
    TWINS,
    WAY_NAMES,
    ZERO,
    ToleranceModel,
    compare,
    gradient_norms,
    shown,
    zeros,
)
from meshmark.measure.laps import Interval, mean_interval
from meshmark.measure.readings import Collective, MemoryReading
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import ModelSpec
from meshmark.records.record import Record, Verdict
from meshmark.spec.algorithm import SYNCHRONOUS
from meshmark.spec.case import Case
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.precision import NARROW
from meshmark.text import pluralize
from meshmark.theory.memory import ExtraMemory, ModelStates, declared_bytes, declared_peak
from meshmark.theory.traffic import METERED_STEP, Flow, OneTimeTraffic, Route, by_route, departed

# --- Traffic.

BARRIER = "barrier"
_MEND_TRAFFIC = (
    "if the framework is meant to send something other than theory says, declare it in `Adapter.traffic_exceptions`"
)
_MEND_STEP = "if the framework is meant to send this in some steps only, declare it in `Adapter.one_time_traffic`"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Calls of one kind over one group that are not what was expected of a rank."""

    rank: int
    route: Route
    measured: Collective | None
    expected: Flow | None
    num_micro_batches: int = 1

    @property
    def measured_bytes(self) -> int:
        return self.measured.num_bytes if self.measured else 0

    @property
    def expected_bytes(self) -> int:
        return self.expected.num_bytes if self.expected else 0

    @property
    def calls(self) -> int:
        return self.measured.count if self.measured else 0

    def __str__(self) -> str:
        kind, ranks = self.route
        over = ", ".join(map(str, ranks))
        found = f"{self.measured_bytes:,} bytes in {_calls(self.calls, self.calls)}" if self.measured else "none"
        wanted = "none"
        if self.expected:
            wanted = f"{self.expected_bytes:,} in {_calls(self.expected.fewest, self.expected.most)}"
            times = _multiple(self.measured_bytes, self.expected_bytes)
            wanted += f" ({times} as many)" if times else ""
            count = self.num_micro_batches
            if count > 1 and self.measured_bytes == count * self.expected_bytes and self.calls >= count:
                wanted += ", as if once for each micro-batch"
        return f"{kind} over ranks {over} on rank {self.rank}: {found}, expected {wanted}"


def _multiple(own: int, expected: int) -> str:
    """Return by what simple factor a number is off, as by elements of another size or a message that is sent again."""
    factors = {"half": own * 2 == expected, "twice": own == expected * 2, "four times": own == expected * 4}
    return next((name for name, fits in factors.items() if fits and own), "")


@dataclass(frozen=True, kw_only=True)
class Unlike:
    """Calls of one kind over one group that a rank's backend did in one step otherwise than in the metered one."""

    rank: int
    step: int
    route: Route
    sent: Collective | None
    metered: Collective | None

    @property
    def more_bytes(self) -> int:
        return (self.sent.num_bytes if self.sent else 0) - (self.metered.num_bytes if self.metered else 0)

    @property
    def more_calls(self) -> int:
        return (self.sent.count if self.sent else 0) - (self.metered.count if self.metered else 0)

    def is_declared(self, declared: Iterable[OneTimeTraffic]) -> bool:
        """Return whether nothing is missing and no more is sent than `declared`.

        What is declared of the metered step is missing in all others. Calls are not counted in the first step, because
        tensors may be put into other buckets once their order is known.
        """
        declared = [each for each in declared if each.kind == self.route[0]]
        own = [each for each in declared if self.step in each.steps]
        metered = [each for each in declared if METERED_STEP in each.steps]
        num_bytes = range(
            sum(each.least_bytes for each in own) - sum(each.most_bytes for each in metered),
            sum(each.most_bytes for each in own) - sum(each.least_bytes for each in metered) + 1,
        )
        calls = range(
            sum(each.least_calls for each in own) - sum(each.most_calls for each in metered),
            sum(each.most_calls for each in own) - sum(each.least_calls for each in metered) + 1,
        )
        return self.more_bytes in num_bytes and (self.step == 0 or self.more_calls in calls)

    def __str__(self) -> str:
        kind, ranks = self.route
        sent, usual = (
            f"{each.num_bytes:,} bytes in {_calls(each.count, each.count)}" if each else "none"
            for each in (self.sent, self.metered)
        )
        over = ", ".join(map(str, ranks))
        return (
            f"{kind} over ranks {over} on rank {self.rank} in step {self.step}: {sent}, in step {METERED_STEP} {usual}"
        )


def unlike_steps(record: Record) -> Iterator[Unlike]:
    """Yield traffic of other steps that is neither the same as in the metered step nor declared."""
    evidence = record.traffic
    for i, groups in enumerate(evidence.alike_steps):
        rank = record.ranks[i]
        usual = next((_routes(group.issued) for group in groups if METERED_STEP in group.steps), None)
        if usual is None:
            continue
        declared = evidence.one_time_traffic[i] if evidence.one_time_traffic else []
        once = {each.kind for each in declared if METERED_STEP in each.steps}  # other steps must lack it
        for group in groups:
            here = _routes(group.issued)
            for step in group.steps:
                if step == METERED_STEP or not _repeats(record, rank, step):
                    continue
                for route in sorted(usual.keys() | here.keys()):
                    each = Unlike(rank=rank, step=step, route=route, sent=here.get(route), metered=usual.get(route))
                    if (each.more_bytes or each.more_calls or route[0] in once) and not each.is_declared(declared):
                        yield each


def _repeats(record: Record, rank: int, step: int) -> bool:
    """Return whether the algorithm sends in `step` the same as in the metered step."""
    return record.case.workload.algorithm.traffic_repeats(record.case, rank, step)


def _routes(collectives: Iterable[Collective]) -> dict[Route, Collective]:
    return {(c.kind, c.ranks): c for c in collectives if c.kind != BARRIER}


def _calls(fewest: int, most: int) -> str:
    return f"{fewest:,} to {most:,} calls" if fewest != most else f"{most:,} call{'s' if most != 1 else ''}"


def judge_communication(record: Record) -> Verdict | None:
    """Judge the traffic of every rank, by kind of call and group of ranks.

    The bytes must be exactly those of theory and declared exceptions, and the number of calls within their bounds.
    Returns None if theory does not plan the traffic, unless a step sends more or less than declared.
    """
    evidence = record.traffic
    if "communication" in record.unmeasured:
        return Verdict(suite="communication", passed=False, summary=record.unmeasured["communication"])
    unlike = sorted(unlike_steps(record), key=lambda each: (-abs(each.more_bytes), each.step))
    if not evidence.planned or None in evidence.planned:
        return _unlike_verdict(unlike, {}) if unlike else None
    expected = [
        by_route(departed(flows or (), declared))
        for flows, declared in zip(evidence.planned, evidence.traffic_exceptions, strict=True)
    ]
    found = [
        difference
        for i, (reading, routes) in enumerate(zip(evidence.readings, expected, strict=True))
        for difference in _differences(record.ranks[i], reading.asked, routes, record.case.layout.num_micro_batches)
    ]
    worst = max(found, key=lambda d: (abs(d.measured_bytes - d.expected_bytes), d.expected is None), default=None)
    barriers = max((_barriers(reading.asked) for reading in evidence.readings), default=0)
    told: dict[str, float | int | str] = {
        "differences": len(found),
        "compared": sum(len(routes) for routes in expected),
        "declared": "; ".join(sorted({d.reason for declared in evidence.traffic_exceptions for d in declared})),
        "barriers": barriers,
    }
    told |= {
        "steps": len({step for groups in evidence.alike_steps for group in groups for step in group.steps}) or 1,
        "unlike_steps": len({each.step for each in unlike}),
        "smallest_message_bytes": 1,
        "smallest_setup_message_bytes": 1
        + max((d.most_bytes for own in evidence.one_time_traffic for d in own), default=0),
        "one_time": "; ".join(sorted({d.reason for declared in evidence.one_time_traffic for d in declared})),
    }
    also = f" (besides {pluralize(barriers, 'barrier')} a step, which no plan counts)" if barriers else ""
    if worst is None and unlike:
        return _unlike_verdict(unlike, told)
    if worst is None:
        return Verdict(suite="communication", passed=True, summary=_as_planned(expected) + also, evidence=told)
    told |= {
        "kind": worst.route[0],
        "ranks": " ".join(map(str, worst.route[1])),
        "rank": worst.rank,
        "measured_bytes": worst.measured_bytes,
        "planned_bytes": worst.expected_bytes,
        "calls": worst.calls,
    }
    more = f", and {pluralize(len(found) - 1, 'more difference')}" if len(found) > 1 else ""
    return Verdict(suite="communication", passed=False, summary=f"{worst}{more}{also}; {_MEND_TRAFFIC}", evidence=told)


def _unlike_verdict(unlike: Sequence[Unlike], told: dict[str, float | int | str]) -> Verdict:
    """Return a failed verdict on steps that sent something else. `unlike` is sorted, most bytes first."""
    worst = unlike[0]
    more = f", and {pluralize(len(unlike) - 1, 'more difference')}" if len(unlike) > 1 else ""
    evidence = told | {
        "kind": worst.route[0],
        "ranks": " ".join(map(str, worst.route[1])),
        "rank": worst.rank,
        "step": worst.step,
        "measured_bytes": worst.sent.num_bytes if worst.sent else 0,
        "planned_bytes": worst.metered.num_bytes if worst.metered else 0,
        "calls": worst.sent.count if worst.sent else 0,
    }
    return Verdict(suite="communication", passed=False, summary=f"{worst}{more}; {_MEND_STEP}", evidence=evidence)


def _barriers(asked: Sequence[Collective]) -> int:
    return sum(collective.count for collective in asked if collective.kind == BARRIER)


def _differences(
    rank: int, asked: list[Collective], expected: dict[Route, Flow], num_micro_batches: int
) -> Iterator[Difference]:
    measured = _routes(asked)
    for route in sorted(measured.keys() | expected.keys()):
        difference = Difference(
            rank=rank,
            route=route,
            measured=measured.get(route),
            expected=expected.get(route),
            num_micro_batches=num_micro_batches,
        )
        wanted = difference.expected
        fewest, most = (wanted.fewest, wanted.most) if wanted else (0, 0)
        if difference.measured_bytes != difference.expected_bytes or not fewest <= difference.calls <= most:
            yield difference


def _as_planned(expected: list[dict[Route, Flow]]) -> str:
    """Return a summary of traffic that is as planned: the number of flows, and the largest one."""
    flows = [flow for routes in expected for flow in routes.values()]
    if not flows:
        return "nothing to communicate"
    largest = max(flows, key=lambda flow: flow.num_bytes)
    calls = _calls(largest.fewest, largest.most)
    told = f"the largest {largest.num_bytes:,} bytes of {largest.kind} in {calls}"
    return f"{pluralize(len(flows), 'flow')} to the byte, {told}"


# --- Memory.

STATE_TOLERANCE = 0.01
"""Relative tolerance on the bytes of each category of model states, of activations, and of the allocator's totals."""
SCALARS_BYTES = {"cpu": 1024, "cuda": 4096}
"""Bytes by which the allocator's totals may also exceed the plan, by device.

They allow for scalars that no engine names: the loss, the norm, the scale and a few counts. A larger excess is a
tensor. On a GPU each scalar takes a block of 512 bytes; engines here hold two to four.
"""
LEAK_BYTES = {"cpu": 64, "cuda": 512}
"""Growth in bytes per step that is not judged, by device.

It allows for a few scalars; on a GPU each takes a block of 512 bytes. Correct engines do not grow at all after the
metered step.
"""
LOSS_BYTES = 256
"""Bytes allowed besides activations that were counted in a pass of one process.

They hold the engine's loss, its share and its scale factors, which are not part of the module. Frameworks here hold
32 to 52 bytes of these.
"""
COUNT_BYTES = 4
"""PyTorch's optimizers count the steps of every tensor."""
TOTALS = ("steady", "peak", "unnamed", "growth")
"""Totals of the allocator's count.

They are the bytes after a step, the maximum, the bytes before the step without a name, and the growth from one step to
the next.
"""

_MEND_STATES = (
    "`Engine.holdings` omits storages or names too many, or the framework holds more or fewer bytes than its layout "
    "promises; if it is meant to hold more, declare that in `Adapter.extra_memory`"
)
_MEND_ACTIVATIONS = (
    "declare what the framework keeps in `Adapter.recipe`, and memory beyond that in `Adapter.extra_memory`"
)
_MEND_MORE_ACTIVATIONS = (
    "first see whether the excess grows with micro-batches (`--layouts`) or with depth (`--model layers=8`). If it "
    f"does, something is kept for too long, and should be freed. Else {_MEND_ACTIVATIONS}"
)
_MEND_MORE = (
    "the allocator counts bytes that are in no plan: first see whether they grow with depth (`--model layers=8`), with "
    "micro-batches (`--layouts`) or with steps (`--endurance`). If they grow, the framework keeps something for too "
    "long, and should be fixed. Declare only a size that follows from its algorithm in `Adapter.extra_memory`, with "
    "the reason"
)
_MEND_GROWTH = (
    "memory grows from step to step, which cannot be declared: find what the framework keeps, for example with "
    "`gc.get_objects()` after two steps, or `torch.cuda.memory_snapshot()`"
)
_MEND_LESS = (
    "the allocator counts fewer bytes than planned: if the framework is meant to need less, declare that in "
    "`Adapter.recipe`, or as a negative size in `Adapter.extra_memory` with its reason"
)

_UNKNOWN = (
    "activations and peak, which are unknown, because the meter could not determine in its limited time which storages "
    "another thread had freed"
)


@dataclass(frozen=True, kw_only=True)
class MemoryTotal:
    """A measured number of one rank, with its plan."""

    category: str
    rank: int
    measured: float
    planned: float
    late: float = 0.0
    """Bytes of the measurement that depend on the timing of a backend's threads.

    In another run they may be freed earlier or allocated later.
    """
    step: int | None = None
    """The step after which it was measured. None means the metered step."""
    interval: Interval | None = None
    """Interval of the growth per step, if several steps give it."""
    spare: int = 0
    """Bytes beyond the plan that may be scalars."""

    @property
    def is_below(self) -> bool:
        return self.measured < self.planned

    @property
    def deviation(self) -> float:
        """The whole deviation, relative to the plan."""
        return (self.measured - self.planned) / max(self.planned, 1.0)

    @property
    def error(self) -> float:
        """Deviation that neither late buffers nor (in totals) scalars account for, relative to the plan."""
        beyond = max(self.measured - self.late - self.planned, self.planned - self.measured, 0.0)
        return max(beyond - self.spare, 0.0) / max(self.planned, 1.0)

    @property
    def where(self) -> str:
        after = f", {_after(self.step)}" if self.step is not None else ""
        return f"{self.category} on rank {self.rank}{after}"

    @property
    def smallest_detectable(self) -> float:
        """Excess over the plan, in bytes, above which the verdict fails."""
        if self.interval:
            return self.spare + self.interval.half_width
        return self.spare + self.late + STATE_TOLERANCE * max(self.planned, 1.0)


def _after(step: int) -> str:
    return f"after step {step}"


def judge_memory(record: Record) -> Verdict | None:
    """Judge the memory of every rank.

    Each number must be within 1 % of the closed form plus what the adapter declares. The numbers are the bytes of
    parameters, gradients, optimizer states and, if planned, activations. The allocator's totals after the step and,
    if planned, at the peak are judged too. Nothing may grow from step to step.

    Returns None if a rank's memory is not planned and nothing else is wrong.
    """
    if "memory" in record.unmeasured:
        return Verdict(suite="memory", passed=False, summary=record.unmeasured["memory"])
    found: list[MemoryTotal] = []
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
            MemoryTotal(category=name, rank=rank, measured=measured, planned=planned, late=scalars.get(name, 0))
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
        summary += f" (not judged on {_listed_ranks(unknown)}: {_UNKNOWN})"
    passed = worst.error <= STATE_TOLERANCE
    return Verdict(
        suite="memory",
        passed=passed,
        summary=summary if passed else f"{summary}{_like(worst, found, record.case)}; {_mend(worst)}",
        evidence=_evidence(worst, found, record),
    )


def _growth(rank: int, live: Mapping[int, int], spare: int) -> MemoryTotal | None:
    """Return the growth of a rank's memory per step, from the metered step on, or None if there are fewer than three.

    The interval is that of the mean difference between consecutive steps. A buffer that appears once and stays widens
    the interval; `_later` judges it. Growth in every step does not widen it.
    """
    steps = sorted(step for step in live if step >= METERED_STEP)
    if len(steps) < 3:
        return None
    interval = mean_interval([float(live[b] - live[a]) for a, b in itertools.pairwise(steps)])
    lowest = max(interval.mean - interval.half_width, 0.0)
    return MemoryTotal(category="growth", rank=rank, measured=lowest, planned=0.0, interval=interval, spare=spare)


def _growth_text(interval: Interval) -> str:
    return f"{interval.mean:,.0f} ± {interval.half_width:,.0f} bytes a step"


def _later(totals: Sequence[MemoryTotal], live: Mapping[int, int]) -> Iterator[MemoryTotal]:
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


def _mend(worst: MemoryTotal) -> str:
    """Return advice on a number that is off, depending on the direction."""
    if worst.category == "growth":
        return _MEND_GROWTH
    if worst.category in TOTALS:
        return _MEND_LESS if worst.is_below else _MEND_MORE
    if worst.category == "activations":
        return _MEND_ACTIVATIONS if worst.is_below else _MEND_MORE_ACTIVATIONS
    return _MEND_STATES


_LIKE = 0.01
"""Relative distance up to which an excess is as large as a known tensor."""


def _like(worst: MemoryTotal, found: Sequence[MemoryTotal], case: Case) -> str:
    """Return what has as many bytes as there are too many, where that is known."""
    excess = worst.measured - worst.planned
    sizes = _known_activations(case) if worst.category == "activations" else {}
    if worst.category == "steady":
        own = [held for held in found if held.rank == worst.rank and held.category in _STATES]
        sizes = {f"all {_STATES[held.category]} of the rank": held.measured for held in own}
    fitting = [name for name, size in sizes.items() if size and abs(excess - size) <= _LIKE * size]
    return f", as much more as {' or '.join(fitting)}" if fitting else ""


_STATES = {"gradients": "gradients", "parameters": "parameters", "optimizer_states": "optimizer states"}


def _known_activations(case: Case) -> dict[str, float]:
    """Return bytes of what may be kept too long in the forward pass: activations, and weights that stage 3 gathers."""
    model, layout = case.workload.model, case.layout
    if not isinstance(model, ModelSpec) or layout.tp * layout.cp > 1:
        return {}
    elements = case.workload.global_batch // (layout.dp * layout.num_micro_batches) * model.seq_len
    counts = range(1, layout.num_micro_batches + 1)
    named = {
        f"{name} of {pluralize(count, 'micro-batch', 'micro-batches')}": count * size
        for name, size in (("logits", elements * model.vocab_size), ("a residual stream", elements * model.hidden))
        for count in counts
    }
    if layout.zero_stage == 3:
        blocks = range(1, model.num_layers + 1)
        named |= {f"the gathered weights of {pluralize(n, 'block')}": n * model.block_parameters for n in blocks}
    widths = dict.fromkeys((4, case.precision.compute.itemsize))
    return {name + " in 16 bits" * (width < 4): width * size for width in widths for name, size in named.items()}


def _listed_ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _evidence(worst: MemoryTotal, found: Sequence[MemoryTotal], record: Record) -> dict[str, float | int | str]:
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
    """Yield each category with its measured and its expected bytes.

    Activations are those that PyTorch's operators save on a CPU, where all memory is the host's. They are left out if
    the meter does not know which storages had been freed.
    """
    plan = plan.with_host() if with_activations else plan
    for name in ("parameters", "gradients", "optimizer_states"):
        yield name, getattr(reading.states, name), getattr(plan, name) + declared_bytes(declared, name)
    if with_activations and reading.ends_known and reading.held is not None and plan.activations is not None:
        yield "activations", reading.held.activations, plan.activations + declared_bytes(declared, "activations")


def memory_totals(
    rank: int, reading: MemoryReading, plan: ModelStates, declared: Sequence[ExtraMemory], *, on_cpu: bool
) -> Iterator[MemoryTotal]:
    """Yield the allocator's totals with their plan.

    The batch passed to the engine is not the engine's, and its measured size is left out. Workspaces of kernels are
    left out too, because no storage outlives them. Peaks are planned for a CPU's kernels only. Without the ends of
    storages it is unknown which buffers at the peak were late, and which bytes had a name.
    """
    steady, peak = reading.steady, reading.peak
    passing = declared_bytes(declared, "unnamed")  # may be held after some steps and not after others
    plan = plan.with_host() if on_cpu else plan
    spare = SCALARS_BYTES["cpu" if on_cpu else "cuda"]
    yield MemoryTotal(
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
        yield MemoryTotal(
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
        yield MemoryTotal(category="unnamed", rank=rank, measured=measured, planned=unnamed, spare=spare)
    if reading.previous_steady_bytes is not None:
        growth = max(steady.total - reading.previous_steady_bytes, 0)
        yield MemoryTotal(category="growth", rank=rank, measured=growth, planned=0.0, late=passing, spare=spare)


# --- Equivalence.

BLIND = 0.3
"""Detection limit above which a run that looks right proves nothing.

The smallest defect of a reduction is a missing part of one of two ranks. It scales a gradient by a half.
"""
BLIND_UNROUNDED = 0.01
"""The same where nothing is rounded to less than float32.

Rounding then hides less than 1e-4 in every workload of Meshmark's. More noise has another cause: a model or a batch
that is not a function of the step.
"""
HIDDEN_STEP = 0.1
"""Largest part of a step that rounding may hide at every step. In the suites it is less than 1e-4."""
HIDDEN = 3.0
"""Multiple of its noise by which a number may be off in the other direction by chance, and hide an error of that
size.
"""


def judge_equivalence(record: Record) -> Verdict:
    """Judge whether a run trained as the truth does.

    Every loss, norm, gradient and parameter must be within its factor of its noise, the start exact, and replicas
    equal. The verdict is *not decided* if the noise hides too much, or is not a number.
    """
    found = record.equivalence
    tolerance_model, run = found.fitted_tolerances, compare(found.deviations)
    excesses = list(tolerance_model.judge(found.deviations))
    if not excesses:
        raise MeshmarkError("nothing of this run was compared: the report of its first rank holds no deviations")
    told = [e for e in excesses if math.isfinite(tolerance_model.noise_of(e[1], e[2]))]
    excess, quantity, step = max(told or excesses)
    factor, worst = tolerance_model.factor_of(quantity), _worst(record, quantity)
    limits = detection_limits(record)
    blindest = max(limits, key=lambda name: limits[name].scaling, default="")
    limit = limits[blindest].scaling if limits else math.inf
    hidden = hidden_step(record)
    twin_excess, reference = tolerance_model.twin_excess(found.deviations), "float64 alone"
    if any(q.kind in TWINS for q in run):
        reference = "float64 and the twin" if twin_excess <= 1 else "float64 alone: the twin is too far from it"
    differs = ""
    if tolerance_model.way and twin_excess <= 1:
        reference = f"float64 and equivalents of the twin ({tolerance_model.way})"
        differs = f"; bits differ from the twin's as {WAY_NAMES[tolerance_model.way.removeprefix('cast-')]} make them"
    evidence: dict[str, float | int | str] = {
        "held_against": reference,
        "worst_quantity": str(quantity),
        "worst_step": step,
        "ratio": excess * factor,
        "distance": run[quantity][step],
        "truth_norm": worst[step].scale,
        "multiple_of_truth": worst[step].factor,
        "noise": tolerance_model.noise_of(quantity, step),
        "factor": factor,
        "false_alarms": str(shown()),
        "detection_limit": limit,
        "blindest": blindest,
        "hidden_step": hidden,
        "detection_limit_any_direction": max((limit.any_direction for limit in limits.values()), default=math.inf),
        "failing": sum(not e <= 1 for e, *_ in excesses),
        "compared": len(excesses),
    }
    if found.diagnosis:
        evidence["diagnosis"] = found.diagnosis.text
    forgets_scale = found.diagnosis is not None and found.diagnosis.fault is Fault.LOSS_SCALE
    wrong = bool(found.wrong_start or found.drifts or (told and not excess <= 1) or forgets_scale)
    unrounded = _is_unrounded(record.case)
    most = BLIND_UNROUNDED if unrounded else BLIND
    undecided = not wrong and (
        len(told) < len(excesses) or not limit <= most or not hidden <= HIDDEN_STEP or not twin_excess <= 1
    )
    if wrong:
        summary = _what_is_wrong(record, tolerance_model, quantity, step, excess * factor)
    elif undecided and not twin_excess <= 1:
        summary = f"cannot tell: the twin itself is {twin_excess:.3g} x as far from the truth as a run may be"
    elif undecided and limit <= most and not hidden <= HIDDEN_STEP:
        summary = (
            "cannot tell: steps of the optimizer are small beside the rounding of the weights, which hides errors of "
            f"up to {hidden:.2g} times a step, so that a step left out may not be seen; a higher learning rate shows it"
        )
    elif undecided and limit <= most:
        unknown = min(str(q) for _, q, s in excesses if not math.isfinite(tolerance_model.noise_of(q, s)))
        summary = f"cannot tell: the noise of {unknown} is no number, for `single` itself overflows"
    elif undecided:
        summary = (
            f"cannot tell: a scaling of the gradient of {blindest} by less than {limit:.2g} would not be seen in the "
            f"noise, where {most:g} is the most that a verdict may leave open"
        )
        if unrounded:
            summary += ": does the model, or batch(step), answer the same each time? Or does rounding decide, as at a "
            summary += "ReLU's kink?"
    else:
        summary = f"worst {quantity} at step {step}: {excess * factor:.2f} x its noise where {factor:.2f} x is allowed"
        summary += differs
    return Verdict(
        suite="equivalence", passed=not wrong and not undecided, undecided=undecided, summary=summary, evidence=evidence
    )


def _is_unrounded(case: Case) -> bool:
    """Return whether nothing of a case is rounded to less than float32, neither by its precision nor to send less."""
    narrow = any(dtype in NARROW for dtype in (case.precision.compute, case.precision.reduction, case.precision.master))
    return not narrow and case.tuning.matmul is None and case.workload.algorithm == SYNCHRONOUS


def _what_is_wrong(record: Record, tolerance_model: ToleranceModel, quantity: Quantity, step: int, ratio: float) -> str:
    """Return a summary of what is wrong. `quantity` at `step` is the worst, at `ratio` times its noise."""
    found = record.equivalence
    if found.wrong_start:
        return f"starts elsewhere: {len(found.wrong_start)} initial values differ, first {found.wrong_start[0]}"
    if found.drifts and ratio <= tolerance_model.factor_of(quantity):
        first = found.drifts[0]
        return f"replicas differ: {first.quantity} at step {first.step} on ranks {first.ranks}"
    if ratio <= tolerance_model.factor_of(quantity) and found.diagnosis:
        return found.diagnosis.text
    multiple = _worst(record, quantity)[step].factor
    reference = "the twin's" if quantity.kind in TWINS else "the truth"
    return f"{quantity} at step {step} is {ratio:.3g} x its noise, {multiple:.9g} x {reference}"


def _worst(record: Record, quantity: Quantity) -> list[Deviation]:
    """The deviations behind a compared quantity."""
    tensors = {multiple: kind for kind, multiple in MULTIPLES.items()}
    return record.equivalence.deviations[replace(quantity, kind=tensors.get(quantity.kind, quantity.kind))]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The smallest relative errors of one parameter's gradient that would have been caught at every step."""

    scaling: float
    """Smallest detectable relative error that scales the gradient."""
    any_direction: float
    """Smallest detectable relative error that leaves the gradient's size unchanged."""


def hidden_step(record: Record) -> float:
    """Return the largest error of a step, as a multiple of the step, that would not be seen at the best of all steps.

    Zero where it is not known how far steps moved the parameters.
    """
    evidence = record.equivalence
    tolerance_model = evidence.fitted_tolerances
    quantities = [q for q in evidence.deviations if q.kind is QuantityKind.PARAMETERS and q in tolerance_model.noise]
    if not quantities:
        return 0.0
    return min(
        (
            math.hypot(*(tolerance_model.tolerance(q, step) for q in quantities)) / moved if moved else math.inf
            for step, moved in enumerate(evidence.moved)
        ),
        default=0.0,
    )


def detection_limits(record: Record) -> dict[str, Limit]:
    """Return the detection limits by parameter, over the steps at which it has a gradient.

    Parameters whose gradient is zero by mathematics have no relative error and are left out. The limit is against the
    truth or the twin, whichever detects more.
    """
    deviations = record.equivalence.deviations
    tolerance_model = record.equivalence.fitted_tolerances
    limits = _limits(tolerance_model, deviations, QuantityKind.GRADIENTS)
    if tolerance_model.twin_excess(deviations) <= 1:
        for subject, limit in _limits(tolerance_model, deviations, QuantityKind.TWIN).items():
            others = limits.get(subject, limit)
            limits[subject] = Limit(
                scaling=min(limit.scaling, others.scaling), any_direction=min(limit.any_direction, others.any_direction)
            )
    return limits


def _limits(tolerance_model: ToleranceModel, deviations: Deviations, kind: QuantityKind) -> dict[str, Limit]:
    """Return the detection limits by parameter for one kind of comparison."""
    limits, norms = {}, gradient_norms(deviations)
    zero = {replace(quantity, kind=kind) for quantity in zeros(deviations)}
    for quantity, steps in deviations.items():
        if quantity.kind is not kind or quantity in zero or quantity not in tolerance_model.noise:
            continue
        used = [step for step, d in enumerate(steps) if 0 < d.scale >= ZERO * norms[step]]
        if not used:  # at no step, or where nothing is a number, or where all is zero
            continue
        any_direction = max(tolerance_model.tolerance(quantity, step) / steps[step].scale for step in used)
        multiple, scaling = replace(quantity, kind=MULTIPLES[kind]), any_direction
        if kind is QuantityKind.TWIN:  # no rounding is a multiple, but some of it may be like an error in one tensor
            any_direction = max(tolerance_model.excused(quantity, step) / steps[step].scale for step in used)
        if multiple in tolerance_model.noise:
            seen = max(
                tolerance_model.tolerance(multiple, s) + HIDDEN * tolerance_model.noise_of(multiple, s) for s in used
            )
            scaling = min(scaling, seen)
        limits[quantity.subject] = Limit(scaling=scaling, any_direction=any_direction)
    return limits


# --- Time: the timed steps must be those whose gradients and updates were judged.

_MEND = "`step` must compute the same as `backward` and `update`, even if its results are not read"


def judge_throughput(record: Record) -> Verdict | None:
    """Judge whether the timed steps computed the same as the steps whose gradients and updates were judged.

    In every launch, all losses and the parameters after the last step must equal the verified path's bit for bit. The
    verified path is the judged steps, continued by the same `backward` and `update`. Replicas must also be equal after
    the last timed step. Returns None if neither was recorded.

    If bits differ, the verified path has been computed again, to see whether this engine's bits are reproducible. If
    they are, the timed path is a different one, and the verdict fails. If they are not (atomic additions, threads),
    only the losses of the judged steps are compared. Each must be within the tolerance of the truth, and so within
    twice that of the other. Under a parameter server the order of replicas is random, so only the losses before the
    first fetch are compared.
    """
    timing, drifts = record.timing, record.equivalence.drifts
    path, losses = timing.observed, record.training.losses
    if drifts:
        first = drifts[0]
        return _verdict(f"replicas differ after timed steps: {first.quantity} on ranks {first.ranks}; {_MEND}", record)
    if path is None or not timing.digests:
        return None
    launches = [(losses, timing.digests), *((one.losses, one.digests) for one in timing.relaunches)]
    differences = [
        f"{told} in launch {number} of {len(launches)}" if len(launches) > 1 else told
        for number, told_of_launch in enumerate((path.differences(*launch) for launch in launches), 1)
        for told in told_of_launch
    ]
    if not differences:
        compared = min(len(losses), len(path.losses))
        marks = " and ".join(str(done) for done in _compared(record))
        each = f", in each of {len(launches)} launches" if len(launches) > 1 else ""
        summary = f"bit for bit what was judged: {compared} losses, parameters after {marks} steps{each}"
        return _verdict(summary, record, passed=True)
    if not path.is_left_to_tolerance(record.case.workload.algorithm):
        return _verdict(f"not what was judged: {differences[0]}; {_MEND}", record)
    until_chance = record.case.workload.algorithm.steps_until_chance
    tolerance_model = record.equivalence.tolerance_model
    num_steps = min(len(losses), path.num_judged, len(losses) if until_chance is None else until_chance)
    of_loss = [quantity for quantity in tolerance_model.noise if quantity.kind is QuantityKind.LOSS]  # of every replica
    tolerances = [
        2 * max(tolerance_model.tolerance(quantity, step) for quantity in of_loss) for step in range(num_steps)
    ]
    excess, step = max(
        (abs(own - other) / tolerance, i)
        for launch, _ in launches
        for i, (own, other, tolerance) in enumerate(zip(launch, path.losses, tolerances, strict=False))
    )
    what = f"losses differ by {excess:.2f} of the tolerance at step {step}; no two runs agree bit for bit"
    return _verdict(what if excess <= 1 else f"not what was judged: {what}; {_MEND}", record, passed=excess <= 1)


def _compared(record: Record) -> list[int]:
    """Return the numbers of steps after which the parameters of both paths are known."""
    path = record.timing.observed
    return [done for done in record.timing.digests if path and path.digest(done) is not None]


def _verdict(summary: str, record: Record, *, passed: bool = False) -> Verdict:
    timing = record.timing
    last = max(timing.digests, default=0)
    evidence: dict[str, float | int | str] = {
        "losses_compared": min(len(record.training.losses), len(timing.observed.losses) if timing.observed else 0),
        "parameters_compared_after": max(_compared(record), default=0),
        "steps": last,
        "parameters_after_last_step": timing.digests.get(last, ""),
    }
    return Verdict(suite="throughput", passed=passed, summary=summary, evidence=evidence)


# --- What was not judged, so that silence is not taken for a good result.


def not_judged(record: Record, adapter: type[Adapter]) -> list[str]:
    """Return descriptions of what the verdicts of an observed pass do not cover."""
    if record.fake_ranks:
        ranks, world = ", ".join(map(str, record.fake_ranks)), record.case.world_size
        return [f"everything but memory and traffic of ranks {ranks}: the world of {world} was fake", *_memory(record)]
    return [*_equivalence(record, adapter), *_memory(record), *_communication(record)]


def _equivalence(record: Record, adapter: type[Adapter]) -> Iterator[str]:
    if record.verdict("equivalence") is None:
        yield "equivalence: nothing was compared with float64"
        return
    sample = record.equivalence.sample
    if sample and sample.steps < record.steps:
        yield f"equivalence: {_steps(range(sample.steps, record.steps))}: no float64 truth was computed"
    if record.case.precision.is_mixed and adapter.arithmetic is None:
        yield (
            "equivalence: errors below the precision's own rounding; the adapter declares no arithmetic, so there is "
            "no twin"
        )


def _memory(record: Record) -> Iterator[str]:
    evidence = record.memory
    if record.verdict("memory") is None:
        yield "memory: no closed form plans what ranks hold"
    yield from _ranks(record, "memory", len(evidence.readings))
    if evidence.readings and all(plan is None or plan.activations is None for plan in evidence.planned):
        yield "memory: activations are not planned"
    if unknown := [record.ranks[i] for i, reading in enumerate(evidence.readings) if not reading.ends_known]:
        where = ", ".join(map(str, unknown))
        yield f"memory: activations and peak on ranks {where}, where the ends of some storages are not known"
    if evidence.readings and not (evidence.live_bytes and len(evidence.live_bytes[0]) > METERED_STEP + 2):
        yield f"memory: growth per step as an interval, which needs {METERED_STEP + 3} steps"
    if evidence.readings and record.environment.device != "cpu":
        yield "memory: activations and peak, which are planned for a CPU's kernels only"
    if evidence.readings and record.steps > 1:
        yield f"memory: the peak of other steps than step {METERED_STEP}"


def _communication(record: Record) -> Iterator[str]:
    evidence = record.traffic
    if record.verdict("communication") is None:
        yield "communication: no closed form plans what ranks send"
    yield from _ranks(record, "communication", len(evidence.readings))
    if not evidence.readings or record.case.world_size == 1:
        return
    repeats = record.case.workload.algorithm.traffic_repeats
    found: dict[str, list[int]] = {}
    for rank in range(record.case.world_size):
        groups = evidence.alike_steps[rank] if rank < len(evidence.alike_steps) else []
        read = {step for group in groups for step in group.steps} | {METERED_STEP}
        others = [step for step in range(record.steps) if step != METERED_STEP]
        unread = [step for step in others if step not in read]
        unlike = [step for step in others if step in read and not repeats(record.case, rank, step)]
        for steps, why in ((unread, "whose traffic is unknown"), (unlike, "whose planned traffic differs")):
            if steps:
                found.setdefault(f"{_steps(steps)}, {why}", []).append(rank)
    for text, ranks in found.items():
        where = "" if len(ranks) == record.case.world_size else f" (ranks {', '.join(map(str, ranks))})"
        yield f"communication: {text}{where}"


def _ranks(record: Record, suite: str, count: int) -> Iterator[str]:
    if count < record.case.world_size and suite not in record.unmeasured:
        yield f"{suite}: {record.case.world_size - count} of {record.case.world_size} ranks, which were not read"


def _steps(steps: Collection[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


_SEEN = {
    ("memory", "smallest_buffer_bytes"): "a buffer of {} that stays",
    ("memory", "smallest_leak_bytes"): "a leak of {} a step",
    ("communication", "smallest_message_bytes"): "a message of {} in any step",
    ("communication", "smallest_setup_message_bytes"): "one of {} in a step that sets up",
}


def smallest_detectable(records: Sequence[Record]) -> str:
    """Return the smallest excess that every one of these records' verdicts would have failed, in words."""
    found: dict[tuple[str, str], float] = {}
    for record in records:
        for verdict in record.verdicts:
            for key in _SEEN:
                if key[0] == verdict.suite and key[1] in verdict.evidence:
                    found[key] = max(found.get(key, 0.0), float(verdict.evidence[key[1]]))
    sizes = {key: pluralize(round(size), "byte") for key, size in found.items()}
    return ", ".join(text.format(sizes[key]) for key, text in _SEEN.items() if key in sizes)
