"""Judge what was recorded: against the truth and its noise, against the plan, and in time.

All are pure functions from a record to a verdict, so that a record on disk can be judged again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from meshmark.adapter.contract import Adapter
from meshmark.errors import MeshmarkError
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
from meshmark.records.record import Record, Verdict
from meshmark.theory.traffic import METERED_STEP

# --- Equivalence.

BLIND = 0.3
"""Detection limit above which a run that looks right has shown nothing: a rank of two whose part is missing, the
smallest defect of all in a reduction, scales a gradient by a half."""
HIDDEN = 3.0
"""Multiple of its noise by which a number may be off in the other direction by chance, and hide an error of that
size.
"""


def judge_equivalence(record: Record) -> Verdict:
    """Every loss, norm, gradient and parameter within its factor of its noise, the start exact, replicas equal; and
    not decided where that noise hides too much, or is no number."""
    found = record.equivalence
    tolerance_model, run = found.tolerance_model.fitted_to(found.deviations), compare(found.deviations)
    excesses = list(tolerance_model.judge(found.deviations))
    if not excesses:
        raise MeshmarkError("nothing of this run was compared: the report of its first rank holds no deviations")
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
    """Smallest detectable relative error that scales the gradient."""
    any_direction: float
    """Smallest detectable relative error that leaves the gradient's size unchanged."""


def detection_limits(record: Record) -> dict[str, Limit]:
    """Return the detection limits by parameter, over the steps at which it has a gradient.

    Parameters whose gradient is zero by mathematics have no relative error and are left out. The limit is against the
    truth or the twin, whichever detects more.
    """
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

_MEND = "`step` must do what `backward` and `update` do, however little of it is read"


def judge_throughput(record: Record) -> Verdict | None:
    """The losses of all steps, and the parameters after the last, are in every launch bit for bit those of the verified
    path: the steps that were judged, and as many more by the same `backward` and `update`; and ranks that hold the same
    hold the same after the last timed step. None where nothing was told of either.

    Where bits differ, another such pass has told whether this engine ever computes the same bits twice. If it does, the
    timed path is another one. If it does not (atomic additions, threads), bits say nothing, and the losses of the steps
    that were judged must agree as two correct runs do: each within the tolerance model's tolerance of the truth, and so
    within twice that of one another. Under a parameter server, which replica comes first is chance: from the first
    fetch on, two correct runs agree in nothing, and the losses before it are those that are compared.
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
    """After how many steps the parameters of both paths are known."""
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
    """Return, in words, what the verdicts of an observed pass leave out; nothing where they leave out nothing."""
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
        for steps, why in ((unread, "of which it is not known what was sent"), (unlike, "in which others are due")):
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
    ("memory", "smallest_buffer_bytes"): "a buffer of {:,.0f} bytes that stays",
    ("memory", "smallest_leak_bytes"): "a leak of {:,.0f} bytes a step",
    ("communication", "smallest_message_bytes"): "a message of {:,.0f} bytes in any step",
    ("communication", "smallest_setup_message_bytes"): "one of {:,.0f} in a step that sets up",
}


def smallest_detectable(records: Sequence[Record]) -> str:
    """Return the smallest excess that every one of these records' verdicts would have failed, in words."""
    found: dict[tuple[str, str], float] = {}
    for record in records:
        for verdict in record.verdicts:
            for key in _SEEN:
                if key[0] == verdict.suite and key[1] in verdict.evidence:
                    found[key] = max(found.get(key, 0.0), float(verdict.evidence[key[1]]))
    return ", ".join(text.format(found[key]) for key, text in _SEEN.items() if key in found)
