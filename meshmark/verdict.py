"""Judges what was recorded: against the truth and its noise, and against the plan.

Pure functions from a record to a verdict: a record on disk can be judged again.
"""

from __future__ import annotations

import math

from meshmark.layout import Precision
from meshmark.record import Record, Verdict
from meshmark.truth import Deviation

NOISE_FACTOR = 4.0
"""A quantity passes within this multiple of its noise. Correct runs of every adapter stay under 2 (reports/ show each
case's worst), and one gradient wrong by 1e-5 stands at more than ten."""
STATE_TOLERANCE = 0.01
"""Relative, on the bytes of each category of model states."""
TRAFFIC_TOLERANCE = 0.01
"""Relative to all planned bytes, on each kind of collective; room for norms and other scalars, of which frameworks
exchange a few."""


def judge_equivalence(record: Record) -> Verdict:
    """Every loss, norm, gradient and parameter within a factor of its noise, the start exact, replicas equal."""
    wrong_start = [q for q, steps in record.deviations.items() if q.startswith("initial/") and steps[0].distance]
    judged = {q: steps for q, steps in record.deviations.items() if not q.startswith("initial/")}
    if "norm" not in record.noise:
        judged.pop("norm", None)  # `single`, which does not clip, tells none to measure noise by
    ratios = [
        (_ratio(deviation, noise_of(record, quantity, step), record.case.precision), quantity, step)
        for quantity, steps in judged.items() for step, deviation in enumerate(steps)
    ]  # fmt: skip
    ratio, quantity, step = max(ratios)
    worst = judged[quantity][step]
    evidence: dict[str, float | int | str] = {
        "worst_quantity": quantity, "worst_step": step, "ratio": ratio, "distance": worst.distance,
        "truth_norm": worst.scale, "multiple_of_truth": worst.factor, "noise": noise_of(record, quantity, step),
        "factor": NOISE_FACTOR, "detection_limit": detection_limit(record),
        "failing": sum(r > NOISE_FACTOR for r, *_ in ratios),
        "compared": len(ratios),
    }  # fmt: skip
    if wrong_start:
        summary = f"starts elsewhere: {len(wrong_start)} initial values differ, first {wrong_start[0]}"
    elif ratio > NOISE_FACTOR:
        summary = f"{quantity} at step {step} is {ratio:.3g} x its noise, {worst.factor:.6g} x the truth"
    elif record.drifts:
        first = record.drifts[0]
        summary = f"replicas differ: {first.quantity} at step {first.step} on ranks {first.ranks}"
    else:
        summary = f"worst {quantity} at step {step}: {ratio:.2f} x its noise"
    passed = not wrong_start and ratio <= NOISE_FACTOR and not record.drifts
    return Verdict(suite="equivalence", passed=passed, summary=summary, evidence=evidence)


def noise_of(record: Record, quantity: str, step: int) -> float:
    """A tensor's noise is that of its step; a scalar's, of which a step gives one sample a run, that of all steps."""
    steps = record.noise[quantity]
    if not all(map(math.isfinite, steps)):
        return math.inf
    return max(steps) if quantity in ("loss", "norm") else steps[step]


def _ratio(deviation: Deviation, noise: float, precision: Precision) -> float:
    """Distance over noise. No distance passes whatever the noise; noise that is not finite excuses nothing; where none
    was seen at all (float64 updates can be exact), half a unit in the last place stands for it."""
    if deviation.distance == 0:
        return 0.0
    noise = noise or deviation.scale * 2.0 ** -(precision.mantissa_bits + 1)
    return deviation.distance / noise if noise and math.isfinite(noise) else math.inf


def detection_limit(record: Record) -> float:
    """The smallest relative error that would have been caught in every gradient of this run: the largest ratio of
    tolerance to norm, over tensors whose gradient is more than noise (a key bias's is zero by mathematics)."""
    limits = [
        NOISE_FACTOR * record.noise[quantity][step] / deviation.scale
        for quantity, steps in record.deviations.items() if quantity.startswith("gradients/")
        for step, deviation in enumerate(steps) if deviation.scale > record.noise[quantity][step]
    ]  # fmt: skip
    return max(limits, default=math.inf)


def judge_memory(record: Record) -> Verdict:
    """Bytes of parameters, gradients and optimizer states on every rank within 1 % of the closed form plus what the
    adapter declares."""
    worst = (-1.0, "", 0, 0.0, 0.0)
    for rank, (reading, plan, declared) in enumerate(
        zip(record.memory, record.planned_states, record.remainders, strict=True)
    ):
        for category in ("parameters", "gradients", "optimizer_states"):
            expected = getattr(plan, category) + sum(r.num_bytes for r in declared if r.category == category)
            measured = getattr(reading.states, category)
            worst = max(worst, (abs(measured - expected) / max(expected, 1.0), category, rank, measured, expected))
    error, category, rank, measured, expected = worst
    summary = f"{category} on rank {rank}: {measured:,.0f} bytes, planned {expected:,.0f} ({error:.2%})"
    reasons = sorted({r.reason for declared in record.remainders for r in declared})
    return Verdict(
        suite="memory", passed=error <= STATE_TOLERANCE, summary=summary,
        evidence={"category": category, "rank": rank, "measured_bytes": measured, "planned_bytes": expected,
                  "relative_error": error, "tolerance": STATE_TOLERANCE, "declared": "; ".join(reasons)},
    )  # fmt: skip


def judge_communication(record: Record) -> Verdict:
    """Bytes by kind on every rank, as asked for, against the closed form."""
    worst = (0.0, "", 0, 0.0, 0.0)
    for rank, (reading, plan) in enumerate(zip(record.traffic, record.planned_traffic, strict=True)):
        measured: dict[str, float] = {}
        for collective in reading.asked:
            measured[collective.kind] = measured.get(collective.kind, 0.0) + collective.num_bytes
        total = max(sum(plan.values()), sum(measured.values()) if not plan else 1.0)
        for kind in sorted(plan.keys() | measured.keys()):
            found, expected = measured.get(kind, 0.0), plan.get(kind, 0.0)
            error = abs(found - expected) / total if total else 0.0
            worst = max(worst, (error, kind, rank, found, expected))
    error, kind, rank, found, expected = worst
    passed = error <= TRAFFIC_TOLERANCE
    what = f"{kind} on rank {rank}: {found:,.0f} bytes, planned {expected:,.0f}" if kind else "nothing to communicate"
    return Verdict(
        suite="communication", passed=passed, summary=f"{what} ({error:.2%} of the step's traffic)" if kind else what,
        evidence={"kind": kind, "rank": rank, "measured_bytes": found, "planned_bytes": expected,
                  "relative_error": error, "tolerance": TRAFFIC_TOLERANCE},
    )  # fmt: skip
