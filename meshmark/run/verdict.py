"""Judges what was recorded: against the truth and its noise, and against the plan.

Pure functions from a record to a verdict: a record on disk can be judged again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshmark.judge.deviation import Deviation, Quantity, QuantityKind
from meshmark.judge.yardstick import FALSE_ALARMS, compare, zeros
from meshmark.measure.readings import MemoryReading
from meshmark.run.record import Record, Verdict
from meshmark.spec.model_spec import ModelSpec
from meshmark.theory.states import ModelStates, Remainder, declared_bytes

STATE_TOLERANCE = 0.01
"""Relative, on the bytes of each category of model states, and of activations."""


def judge_equivalence(record: Record) -> Verdict:
    """Every loss, norm, gradient and parameter within its factor of its noise, the start exact, replicas equal."""
    found = record.equivalence
    wrong_start = found.wrong_start
    yardstick, run = found.yardstick, compare(found.deviations)
    excesses = list(yardstick.excesses(run))
    excess, quantity, step = max(excesses)
    noise, factor, worst = yardstick.noise_of(quantity, step), yardstick.factor_of(quantity), _worst(record, quantity)
    limits = detection_limits(record)
    blindest = max(limits, key=lambda name: limits[name].scaling, default="")
    evidence: dict[str, float | int | str] = {
        "worst_quantity": str(quantity),
        "worst_step": step,
        "ratio": excess * factor,
        "distance": run[quantity][step],
        "truth_norm": worst[step].scale,
        "multiple_of_truth": worst[step].factor,
        "noise": noise,
        "factor": factor,
        "false_alarm_probability": FALSE_ALARMS,
        "detection_limit": max((limit.scaling for limit in limits.values()), default=math.inf),
        "blindest": blindest,
        "detection_limit_any_direction": max((limit.any_direction for limit in limits.values()), default=math.inf),
        "failing": sum(not e <= 1 for e, *_ in excesses),
        "compared": len(excesses),
    }
    if found.diagnosis:
        evidence["diagnosis"] = found.diagnosis.text
    if wrong_start:
        summary = f"starts elsewhere: {len(wrong_start)} initial values differ, first {wrong_start[0]}"
    elif excess > 1:
        summary = (
            f"{quantity} at step {step} is {excess * factor:.3g} x its noise, {worst[step].factor:.6g} x the truth"
        )
    elif found.drifts:
        first = found.drifts[0]
        summary = f"replicas differ: {first.quantity} at step {first.step} on ranks {first.ranks}"
    else:
        summary = f"worst {quantity} at step {step}: {excess * factor:.2f} x its noise where {factor:.2f} x is allowed"
    passed = not wrong_start and excess <= 1 and not found.drifts
    return Verdict(suite="equivalence", passed=passed, summary=summary, evidence=evidence)


def _worst(record: Record, quantity: Quantity) -> list[Deviation]:
    """The deviations behind a compared quantity."""
    is_scale = quantity.kind is QuantityKind.SCALE
    return record.equivalence.deviations[replace(quantity, kind=QuantityKind.GRADIENTS) if is_scale else quantity]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The smallest relative errors of one parameter's gradient that would have been caught at every step."""

    scaling: float
    """Of a factor on it."""
    any_direction: float
    """Of an error that leaves its size alone."""


def detection_limits(record: Record) -> dict[str, Limit]:
    """By parameter; those whose gradient is zero by mathematics have none."""
    yardstick, zero, limits = record.equivalence.yardstick, zeros(record.equivalence.deviations), {}
    for quantity, steps in record.equivalence.deviations.items():
        if quantity.kind is not QuantityKind.GRADIENTS or quantity in zero or quantity not in yardstick.noise:
            continue
        distances = [
            yardstick.tolerance(quantity, step) / d.scale if d.scale else math.inf for step, d in enumerate(steps)
        ]
        multiple = replace(quantity, kind=QuantityKind.SCALE)
        # A number's noise may point the other way, and then hides as much as it is.
        by_multiple = (
            yardstick.tolerance(multiple, 0) + yardstick.noise_of(multiple, 0)
            if multiple in yardstick.noise
            else math.inf
        )
        limits[quantity.subject] = Limit(scaling=min(max(distances), by_multiple), any_direction=max(distances))
    return limits


_MEND_STATES = (
    "`Engine.holdings` leaves storages out or names too many, or the framework holds other bytes than its layout "
    "promises; what it is meant to hold besides goes into `Adapter.remainders`"
)
_MEND_ACTIVATIONS = (
    "what the framework is meant to keep follows from `Adapter.recipe`, and what is over from `Adapter.remainders`"
)


def _unmeasured(record: Record, suite: str) -> Verdict | None:
    """A failure where the adapter itself could not tell what `suite` judges by."""
    if suite not in record.unmeasured:
        return None
    return Verdict(suite=suite, passed=False, summary=record.unmeasured[suite])


def judge_memory(record: Record) -> Verdict | None:
    """Bytes of parameters, gradients, optimizer states and, where they are planned, activations on every rank within
    1 % of the closed form plus what the adapter declares; None where nothing is planned."""
    if failed := _unmeasured(record, "memory"):
        return failed
    worst = (-1.0, "", 0, 0.0, 0.0)
    on_cpu = record.environment.device == "cpu"
    for rank, (reading, plan, declared) in enumerate(
        zip(record.memory.readings, record.memory.planned, record.memory.remainders, strict=True)
    ):
        if plan is None:
            return None
        for category, measured, expected in memory_categories(reading, plan, declared, with_activations=on_cpu):
            worst = max(worst, (abs(measured - expected) / max(expected, 1.0), category, rank, measured, expected))
    error, category, rank, measured, expected = worst
    summary = f"{category} on rank {rank}: {measured:,.0f} bytes, planned {expected:,.0f} ({error:.2%})"
    if not isinstance(record.case.workload.model, ModelSpec):
        summary += "; activations: not planned"
    if error > STATE_TOLERANCE:
        summary += "; " + (_MEND_ACTIVATIONS if category == "activations" else _MEND_STATES)
    reasons = sorted({r.reason for declared in record.memory.remainders for r in declared})
    return Verdict(
        suite="memory",
        passed=error <= STATE_TOLERANCE,
        summary=summary,
        evidence={
            "category": category,
            "rank": rank,
            "measured_bytes": measured,
            "planned_bytes": expected,
            "relative_error": error,
            "tolerance": STATE_TOLERANCE,
            "declared": "; ".join(reasons),
        },
    )


def memory_categories(
    reading: MemoryReading, plan: ModelStates, declared: Sequence[Remainder], *, with_activations: bool
) -> Iterator[tuple[str, float, float]]:
    """Category, measured and expected bytes. Activations are those that PyTorch's operators save on a CPU."""
    for name in ("parameters", "gradients", "optimizer_states"):
        yield name, getattr(reading.states, name), getattr(plan, name) + declared_bytes(declared, name)
    if with_activations and reading.held is not None and plan.activations is not None:
        yield "activations", reading.held.activations, plan.activations + declared_bytes(declared, "activations")
