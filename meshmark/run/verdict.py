"""Judges what was recorded: against the truth and its noise, and against the plan.

Pure functions from a record to a verdict: a record on disk can be judged again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind
from meshmark.judge.false_alarms import shown
from meshmark.judge.tolerance_model import (
    MULTIPLES,
    TWINS,
    WAY_NAMES,
    ZERO,
    ToleranceModel,
    compare,
    gradient_norms,
    zeros,
)
from meshmark.run.record import Record, Verdict

BLIND = 0.3
"""Detection limit above which a run that looks right has shown nothing: a rank of two whose part is missing, the
smallest defect of all in a reduction, scales a gradient by a half."""
HIDDEN = 3.0
"""Of its noise: by so much a number may happen to be off the other way, and hide as much of an error."""


def judge_equivalence(record: Record) -> Verdict:
    """Every loss, norm, gradient and parameter within its factor of its noise, the start exact, replicas equal; and
    not decided where that noise hides too much, or is no number."""
    found = record.equivalence
    tolerance_model, run = found.tolerance_model.fitted_to(found.deviations), compare(found.deviations)
    excesses = list(tolerance_model.judge(found.deviations))
    told = [e for e in excesses if math.isfinite(tolerance_model.noise_of(e[1], e[2]))]
    excess, quantity, step = max(told or excesses)
    factor, worst = tolerance_model.factor_of(quantity), _worst(record, quantity)
    limits = detection_limits(record)
    blindest = max(limits, key=lambda name: limits[name].scaling, default="")
    limit = limits[blindest].scaling if limits else math.inf
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
        "detection_limit_any_direction": max((limit.any_direction for limit in limits.values()), default=math.inf),
        "failing": sum(not e <= 1 for e, *_ in excesses),
        "compared": len(excesses),
    }
    if found.diagnosis:
        evidence["diagnosis"] = found.diagnosis.text
    wrong = bool(found.wrong_start or found.drifts or (told and not excess <= 1))
    undecided = not wrong and (len(told) < len(excesses) or not limit <= BLIND or not twin_excess <= 1)
    if wrong:
        summary = _what_is_wrong(record, tolerance_model, quantity, step, excess * factor)
    elif undecided and not twin_excess <= 1:
        summary = f"cannot tell: the twin itself is {twin_excess:.3g} x as far from the truth as a run may be"
    elif undecided and limit <= BLIND:
        unknown = min(str(q) for _, q, s in excesses if not math.isfinite(tolerance_model.noise_of(q, s)))
        summary = f"cannot tell: the noise of {unknown} is no number, for `single` itself overflows"
    elif undecided:
        summary = (
            f"cannot tell: a scaling of the gradient of {blindest} by less than {limit:.2g} would not be seen in the "
            f"noise, where {BLIND:g} is the most that a verdict may leave open"
        )
    else:
        summary = f"worst {quantity} at step {step}: {excess * factor:.2f} x its noise where {factor:.2f} x is allowed"
        summary += differs
    return Verdict(
        suite="equivalence", passed=not wrong and not undecided, undecided=undecided, summary=summary, evidence=evidence
    )


def _what_is_wrong(record: Record, tolerance_model: ToleranceModel, quantity: Quantity, step: int, ratio: float) -> str:
    """`quantity` at `step` is the worst, that multiple of its noise."""
    found = record.equivalence
    if found.wrong_start:
        return f"starts elsewhere: {len(found.wrong_start)} initial values differ, first {found.wrong_start[0]}"
    if found.drifts and ratio <= tolerance_model.factor_of(quantity):
        first = found.drifts[0]
        return f"replicas differ: {first.quantity} at step {first.step} on ranks {first.ranks}"
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
    """Of a factor on it."""
    any_direction: float
    """Of an error that leaves its size alone."""


def detection_limits(record: Record) -> dict[str, Limit]:
    """By parameter, over the steps at which it has a gradient; those whose gradient is zero by mathematics, which have
    no relative error, are left out. Against the truth or the twin, whichever sees more."""
    deviations = record.equivalence.deviations
    tolerance_model = record.equivalence.tolerance_model.fitted_to(deviations)
    limits = _limits(tolerance_model, deviations, QuantityKind.GRADIENTS)
    if tolerance_model.twin_excess(deviations) <= 1:
        for subject, limit in _limits(tolerance_model, deviations, QuantityKind.TWIN).items():
            others = limits.get(subject, limit)
            limits[subject] = Limit(
                scaling=min(limit.scaling, others.scaling), any_direction=min(limit.any_direction, others.any_direction)
            )
    return limits


def _limits(tolerance_model: ToleranceModel, deviations: Deviations, kind: QuantityKind) -> dict[str, Limit]:
    """Those by one kind of comparison alone."""
    limits, norms = {}, gradient_norms(deviations)
    zero = {replace(quantity, kind=kind) for quantity in zeros(deviations)}
    for quantity, steps in deviations.items():
        if quantity.kind is not kind or quantity in zero or quantity not in tolerance_model.noise:
            continue
        used = [step for step, d in enumerate(steps) if d.scale >= ZERO * norms[step]]
        if not used:  # at no step, or where nothing is a number
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
