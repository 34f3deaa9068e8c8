"""Diagnose the likely class of a run's defect, and where it begins.

Runs on rank 0, which has the whole trace, and only when something exceeds its tolerance. The earliest step with
anything wrong decides. Within it, initial values come before gradients, gradients before the update, and the update
before merely reported values, because each makes the next wrong. Two independent defects in one step give one
diagnosis: fix it, and run again.

The run of a large model is diagnosed from its deviations alone, because its tensors are gone. To weigh single sequences
as `diagnose` does would need several whole models in float64. A small model in the same layout shows the same defect,
and can be diagnosed fully.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshmark import rank_progress
from meshmark.judge.deviation import Deviations, Drift, Quantity, QuantityKind
from meshmark.judge.evaluation_faults import explain_evaluation
from meshmark.judge.failed_step import Explanation, FailedStep, Stopwatch, block_of
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault, named_factor
from meshmark.judge.gradient_faults import (
    explain_buffers,
    explain_gradients,
    nobody_reduced,
    not_summed_over_tp,
    shards_of_owners,
)
from meshmark.judge.partial_faults import describe_region, on_ranks, wrong_region
from meshmark.judge.tolerance_model import TWINS, ToleranceModel, zeros
from meshmark.judge.trace import Trace, low_precisions
from meshmark.judge.truth import ExactOptimizer
from meshmark.judge.twin import Twin
from meshmark.judge.update_faults import explain_norm, explain_updates, replay
from meshmark.spec.case import Case
from meshmark.text import pluralize

# --- Diagnose the likely class of a run's defect, and where it begins.

UNKNOWN = (Fault.UNEXPLAINED, Fault.FORWARD, Fault.BACKWARD)
"""Faults that are reported if no hypothesis fits."""
_NEAR = 1e-4
"""Relative error of a loss below which its difference is reported, not its ratio."""
_GRADIENTS = (QuantityKind.GRADIENTS, QuantityKind.SCALE)
RULED = 2
"""Number of correct updates before a step that confirm the rule.

Betas and moments show in the second, not the first.
"""


def diagnose(
    case: Case,
    trace: Trace,
    deviations: Deviations,
    drifts: Sequence[Drift],
    tolerance_model: ToleranceModel,
    twin: Twin | None = None,
) -> Diagnosis | None:
    """Return the diagnosis, or None when nothing is wrong."""
    rank_progress.begin(rank_progress.Phase.EXPLAIN)
    wrong = {(q, step): excess for excess, q, step in tolerance_model.judge(deviations) if not excess <= 1}
    if start := [q.name for q, d in deviations.items() if q.kind is QuantityKind.INITIAL and d[0].distance != 0]:
        return _start(trace, start)
    if drifts_at_start := [d for d in drifts if d.quantity.kind is QuantityKind.PARAMETERS and d.step == 0]:
        return first_drift(drifts_at_start)
    first = min((step for _, step in wrong), default=None)
    drift = first_drift(drifts)
    if drift and (first is None or drift.step < first or (drift.step == first and not _wrong(wrong, first, drift))):
        return _of_drifted(case, trace, drift, tolerance_model)
    if first is None:
        return None
    here = {q: e for (q, step), e in wrong.items() if step == first}
    drifted = drift is not None and drift.step == first and drift.detail.startswith("gradients")
    at = _WrongStep(step=first, excesses=here, drifted=drifted, twin=twin)
    found = _at(case, trace, deviations, tolerance_model, at)
    loss = min((step for q, step in wrong if q in (QuantityKind.LOSS.of(), QuantityKind.TWIN_LOSS.of())), default=first)
    # A bias that is added twice, or left out, is zero at first. Where replicas have drifted, so has the loss.
    if found.fault in (Fault.SCALED, Fault.MISSING) and loss > first and not (drift and drift.step == first):
        told = f"from step {loss} on the loss is wrong too, so the forward pass or its batch is"
        there = {q: e for (q, step), e in wrong.items() if step == loss}
        later = _WrongStep(step=loss, excesses=there, drifted=False, twin=twin, search=at.search)
        gradients = _without_zeros(_failed(case, trace, tolerance_model, later, *_GRADIENTS), deviations)
        if gradients.names and (cause := explain_gradients(gradients)) and cause[0] is not found.fault:
            told = f"step {loss} tells the cause: {cause[1]}"
        found = dataclasses.replace(found, detail=f"{found.detail}; {told}")
    if not drift or drift.step != first:
        return found
    if found.fault in UNKNOWN:

        def tolerance(name: str) -> float:
            return tolerance_model.tolerance(QuantityKind.GRADIENTS.of(name), first)

        if drifted and (parts := not_summed_over_tp(case, trace, first, tolerance)):
            names = ", ".join(parts[:MOST_NAMES])
            detail = f"the sum over tensor-parallel ranks: their gradients of {names} add up to the truth"
            return dataclasses.replace(drift, fault=Fault.NOT_REDUCED, detail=detail)
        return dataclasses.replace(drift, detail=f"{drift.detail}, which is wrong too")
    apart = (Fault.NOT_REDUCED, Fault.SCALED)  # one number is a multiple of any other
    if found.fault in apart and drifted and (reported := nobody_reduced(case, trace, first)):
        weights = found.detail.partition("; ")[2] if found.fault is Fault.NOT_REDUCED else ""
        told = f"{reported}; on the lowest, {weights}" if weights else reported
        return dataclasses.replace(found, fault=Fault.NOT_REDUCED, detail=told)
    return _on_compared_ranks(found, [each for each in drifts if set(each.ranks) <= set(drift.ranks)])


def _of_drifted(case: Case, trace: Trace, drift: Diagnosis, tolerance_model: ToleranceModel) -> Diagnosis:
    """Diagnose gradients that are right on the lowest rank, from the wrong ones on the drifting ranks."""
    step, held = drift.step, trace.drifted
    if not drift.detail.startswith("gradients"):
        return drift
    found = dict[int, Explanation]()
    for rank, gradients in held.items():
        theirs = dataclasses.replace(trace, gradients=[*trace.gradients[:step], {**trace.gradients[step], **gradients}])
        tolerances = {n: tolerance_model.tolerance(QuantityKind.GRADIENTS.of(n), step) for n in gradients}
        failed = FailedStep(case=case, trace=theirs, step=step, tolerances=tolerances, drifted=True)
        off = {n: np.linalg.norm(gradients[n] - failed.exact[n]) / tolerances[n] for n in gradients}
        worst = sorted((n for n in off if off[n] > 1), key=lambda n: -off[n])
        failed = dataclasses.replace(failed, tolerances={n: tolerances[n] for n in worst})
        explained = explain_gradients(failed) if worst else None
        if explained is None:
            return drift
        found[rank] = explained
    faults = {fault for fault, _ in found.values()}
    if len(faults) != 1:
        return drift
    details = dict.fromkeys(detail for _, detail in found.values())
    told = "; ".join(details if len(details) == 1 else (f"rank {rank}: {text}" for rank, (_, text) in found.items()))
    return dataclasses.replace(drift, fault=faults.pop(), detail=f"{told}; on the lowest rank they are right")


def _on_compared_ranks(found: Diagnosis, drifts: Sequence[Drift]) -> Diagnosis:
    """Return the diagnosis of the lowest rank's tensors, with the ranks that it holds for.

    What other ranks hold is not compared with the truth. Where most of them agree, it is taken to be right.
    """
    odd = sorted({rank for drift in drifts for rank in drift.ranks})
    others = sorted({rank for drift in drifts for rank in drift.others})
    if not others or min(odd) < min(others):
        return dataclasses.replace(found, ranks=odd)
    if len(others) > len(odd):
        return dataclasses.replace(found, ranks=others)
    apart = f"; {_ranks(odd)} {'hold' if len(odd) > 1 else 'holds'} other values, which are not compared with the truth"
    return dataclasses.replace(found, ranks=others, detail=found.detail + apart)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _wrong(wrong: dict[tuple[Quantity, int], float], step: int, drift: Diagnosis) -> bool:
    """Return whether the drifting tensors, or the norm that clipped them, are also wrong on the lowest rank.

    The wrong tensor then says more than the drift.
    """
    if (QuantityKind.NORM.of(), step) in wrong and drift.detail.startswith("parameters"):
        return True
    return any(
        (kind.of(name), step) in wrong
        for kind in (QuantityKind.GRADIENTS, QuantityKind.SCALE, QuantityKind.PARAMETERS, *TWINS)
        for name in drift.names
    )


def _start(trace: Trace, names: list[str]) -> Diagnosis:
    present = [trace.parameters[0][name] for name in names if name in trace.parameters[0]]
    kinds = low_precisions(iter(present)) if any(np.any(t % 1) for t in present) else []
    detail = f"{len(names)} initial values differ" + (f"; they are all {kinds[0]} numbers" if kinds else "")
    return _diagnosis((Fault.START, detail), 0, names)


def first_drift(drifts: Sequence[Drift]) -> Diagnosis | None:
    """Return what can be said from the ranks' differences alone, or None if there are none."""
    if not drifts:
        return None

    # Parameters are noted before the first step and after each, gradients in it.
    def since(drift: Drift) -> int:
        return max(drift.step - 1, 0) if drift.quantity.kind is QuantityKind.PARAMETERS else drift.step

    step = min(since(drift) for drift in drifts)
    here = [drift for drift in drifts if since(drift) == step]
    kinds = {drift.quantity.kind for drift in here}
    kind = QuantityKind.GRADIENTS if QuantityKind.GRADIENTS in kinds else QuantityKind.PARAMETERS
    of_kind = [drift for drift in here if drift.quantity.kind is kind]
    names = [drift.quantity.name for drift in of_kind]
    ranks = sorted({rank for drift in here for rank in drift.ranks})
    detail = f"{kind} differ from those of the lowest rank that holds them"
    if all(drift.unchanged for drift in of_kind):
        detail += ": they are those of the step before"
    return dataclasses.replace(_diagnosis((Fault.DRIFT, detail), step, names), ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class _WrongStep:
    """The first step at which anything is wrong."""

    step: int
    excesses: dict[Quantity, float]
    """Excess of each quantity that exceeds its tolerance."""
    drifted: bool
    """True if gradients also differ between ranks."""
    twin: Twin | None
    """The twin with which the run's gradients were also compared."""
    search: Stopwatch = field(default_factory=Stopwatch)
    """Time that the search for its cause has taken."""


def _at(case: Case, trace: Trace, deviations: Deviations, tolerance_model: ToleranceModel, at: _WrongStep) -> Diagnosis:
    """Return what is wrong at that step."""
    step, wrong = at.step, at.excesses

    failed = functools.partial(_failed, case, trace, tolerance_model, at)
    gradients, updates = _without_zeros(failed(*_GRADIENTS), deviations), failed(QuantityKind.PARAMETERS)
    of_twin = dataclasses.replace(failed(QuantityKind.TWIN, QuantityKind.TWIN_SCALE), twin=at.twin)
    if of_twin.names and (found := _explained(of_twin, deviations)).fault not in UNKNOWN:
        return found
    if gradients.names or of_twin.names:
        return _explained(gradients if gradients.names else of_twin, deviations)
    if QuantityKind.NORM.of() in wrong:
        reported = trace.norms[step] or 0.0
        return _diagnosis(explain_norm(reported, trace.gradients[step], gradients), step, updates.names)
    if updates.names:
        unknown = Fault.UNEXPLAINED, "the gradients are right, and no known update rule makes this of them"
        if step >= RULED:
            unknown = (
                Fault.UPDATE,
                "right up to the step before: its states are other ones now, or the rule has changed",
            )
        explained = explain_updates(updates) or (unknown[0], f"{unknown[1]}; {_where_moved(updates)}")
        return _diagnosis(explained, step, updates.names)
    if buffers := failed(QuantityKind.BUFFERS).names:
        explanation, ranks = explain_buffers(gradients, buffers)
        return dataclasses.replace(_diagnosis(explanation, step, buffers), ranks=ranks)
    if not gradients.loss_is_wrong and QuantityKind.EVALUATION.of() in wrong:
        multiple = deviations[QuantityKind.EVALUATION.of()][step].factor
        return _diagnosis(explain_evaluation(case, trace, multiple, gradients.known_factors()), step, [])
    factor = named_factor(_loss_factor(deviations, step), gradients.known_factors())
    return _diagnosis((Fault.LOSS, f"{factor} times the truth, while every gradient is right"), step, [])


def _failed(
    case: Case, trace: Trace, tolerance_model: ToleranceModel, at: _WrongStep, *kinds: QuantityKind
) -> FailedStep:
    """Return the step with its wrong quantities of these kinds, with tolerances of the first kind."""
    worst: dict[str, float] = {}
    for quantity, excess in at.excesses.items():
        if quantity.kind in kinds:
            worst[quantity.name] = max(worst.get(quantity.name, 0.0), excess)
    names = sorted(worst, key=lambda name: -worst[name])
    compared = {} if kinds[0] is QuantityKind.PARAMETERS else trace.gradients[at.step].keys() - worst.keys()
    loss = QuantityKind.TWIN_LOSS if kinds[0] is QuantityKind.TWIN else QuantityKind.LOSS

    def tolerance(quantity: Quantity) -> float:
        return tolerance_model.tolerance(quantity, at.step) if quantity in tolerance_model.noise else math.inf

    return FailedStep(
        case=case,
        trace=trace,
        step=at.step,
        tolerances={name: tolerance_model.tolerance(kinds[0].of(name), at.step) for name in names},
        drifted=at.drifted,
        loss_is_wrong=not at.excesses.keys().isdisjoint({QuantityKind.LOSS.of(), QuantityKind.TWIN_LOSS.of()}),
        loss_tolerance=tolerance(loss.of()),
        right={name: tolerance(kinds[0].of(name)) for name in compared},
        search=at.search,
    )


def _without_zeros(failed: FailedStep, deviations: Deviations) -> FailedStep:
    """Leave out gradients that are mathematically zero, which are all rounding, unless no others are wrong."""
    zero = {q.name for q in zeros(deviations)}
    solid = {name: t for name, t in failed.tolerances.items() if name not in zero}
    return dataclasses.replace(failed, tolerances=solid) if solid else failed


def _explained(failed: FailedStep, deviations: Deviations) -> Diagnosis:
    """Explain all wrong gradients by one hypothesis, or the worst one alone if they differ."""
    if found := explain_gradients(failed):
        return _diagnosis(found, failed.step, failed.names)
    worst = failed.names[0]
    alone = dataclasses.replace(
        failed, tolerances={worst: failed.tolerances[worst]}, right={**failed.right, **failed.tolerances}
    )
    if len(failed.names) > 1 and not failed.loss_is_wrong and (found := explain_gradients(alone)):
        fault, detail = found
        if fault in (Fault.DROPPED, Fault.MISSING) and (owned := shards_of_owners(failed)):
            return _diagnosis(owned, failed.step, failed.names)
        return _diagnosis((fault, f"{detail} (the worst; the others are wrong otherwise)"), failed.step, failed.names)
    where = _where(failed, deviations)
    if failed.loss_is_wrong:
        factor = _loss_factor(deviations, failed.step)
        small = abs(factor - 1.0) < _NEAR
        size = f"off by {factor - 1.0:+.2g} of" if small else f"{factor:.6g} times"
        explanation = Fault.FORWARD, f"the loss is {size} the truth; {where}"
    else:
        explanation = Fault.BACKWARD, f"the loss is right; {where}"
    return _diagnosis(explanation, failed.step, failed.names)


def _where(failed: FailedStep, deviations: Deviations) -> str:
    """Return the smallest part of the run that contains an error without an explanation, and how the error grows."""
    own, exact = failed.trace.gradients[failed.step], failed.exact
    wrong = f"{len(failed.names)} of {pluralize(len(own), 'gradient')} wrong"
    blocks = sorted({block_of(name) for name in failed.names})
    if len(blocks) <= MOST_NAMES and len(blocks) < len({block_of(name) for name in own}):
        wrong += f", all in {', '.join(blocks)}"
    if region := wrong_region(failed, own, exact):
        wrong += f", {describe_region(region)}"
    if ranks := on_ranks(failed, exact):
        wrong += f"; rows that one rank's data touches are right except on data-parallel ranks {ranks}"
    kind = QuantityKind.TWIN if failed.twin else QuantityKind.GRADIENTS
    steps = deviations.get(kind.of(failed.names[0]), [])[failed.step :]
    relative = [f"{d.distance / d.scale:.2g}" for d in steps if d.scale]
    return f"{wrong}; the worst is off by {', '.join(relative)} from step to step" if len(relative) > 1 else wrong


def _where_moved(failed: FailedStep) -> str:
    """Return the smallest part of the run that contains wrong updates without an explanation."""
    after = failed.trace.parameters[failed.step + 1]
    exact = replay(failed, ExactOptimizer(failed.case.workload.optimizer))
    wrong = f"{len(failed.names)} of {pluralize(len(after), 'parameter')} wrong"
    blocks = sorted({block_of(name) for name in failed.names})
    if len(blocks) <= MOST_NAMES and len(blocks) < len({block_of(name) for name in after}):
        wrong += f", all in {', '.join(blocks)}"
    region = wrong_region(failed, after, exact)
    return f"{wrong}, {describe_region(region)}" if region else wrong


def _loss_factor(deviations: Deviations, step: int) -> float:
    """Return the loss as a multiple of the twin's if there is one, because the twin is more precise, else of the
    truth.
    """
    steps = deviations.get(QuantityKind.TWIN_LOSS.of()) or deviations[QuantityKind.LOSS.of()]
    return steps[step].factor


def _diagnosis(finding: Explanation, step: int, names: Sequence[str]) -> Diagnosis:
    fault, detail = finding
    return Diagnosis(fault=fault, step=step, names=list(names[:MOST_NAMES]), num_names=len(names), detail=detail)


# --- Diagnose the run of a large model from its deviations alone, because its tensors are gone.

_SAME = 1e-3
"""Factors that differ by less, relative to one, count as equal."""
_ALONG = 0.05
"""Share of a deviation that its factor may leave unexplained."""
_ADVICE = "a model of up to 20 million parameters in the same layout is diagnosed in full"


def diagnose_sample(
    deviations: Deviations, drifts: Sequence[Drift], tolerance_model: ToleranceModel
) -> Diagnosis | None:
    """Return the diagnosis, or None when nothing is wrong."""
    if start := [q.name for q, d in deviations.items() if q.kind is QuantityKind.INITIAL and d[0].distance]:
        return _sample_finding(Fault.START, f"{len(start)} initial values differ", 0, start)
    wrong = [(step, q, e) for e, q, step in tolerance_model.judge(deviations) if not e <= 1]
    first = min((step for step, *_ in wrong), default=None)
    drift = first_drift(drifts)
    if drift and (first is None or drift.step <= first):
        return drift
    if first is None:
        return None
    here = {q: e for step, q, e in sorted(wrong, key=lambda w: -w[2]) if step == first}
    zero = {q.name for q in zeros(deviations)}
    gradients = _names(here, QuantityKind.GRADIENTS, QuantityKind.SCALE)
    if solid := [name for name in gradients if name not in zero] or gradients:
        return _of_gradients(deviations, first, solid, loss_is_wrong=QuantityKind.LOSS.of() in here)
    if QuantityKind.NORM.of() in here:
        factor = deviations[QuantityKind.NORM.of()][first].factor
        return _sample_finding(Fault.CLIPPING, f"the reported norm is {factor:.7g} times the right one", first, [])
    if updates := _names(here, QuantityKind.PARAMETERS):
        return _sample_finding(Fault.UPDATE, f"the gradients are right; {_ADVICE}", first, updates)
    factor = deviations[QuantityKind.LOSS.of()][first].factor
    return _sample_finding(Fault.LOSS, f"{factor:.7g} times the truth, while every gradient is right", first, [])


def _names(wrong: dict[Quantity, float], *kinds: QuantityKind) -> list[str]:
    return list(dict.fromkeys(q.name for q in wrong if q.kind in kinds))


def _of_gradients(deviations: Deviations, step: int, names: list[str], *, loss_is_wrong: bool) -> Diagnosis:
    found = [deviations[QuantityKind.GRADIENTS.of(name)][step] for name in names]
    if absent := [d for d in found if not np.isfinite(d.distance) or (d.factor == 0 and d.scale)]:
        return _sample_finding(
            Fault.MISSING, f"{len(absent)} of {len(names)} are absent, zero or no number", step, names
        )
    factors = [d.factor for d in found]
    left_over = [abs(d.distance - abs(d.factor - 1) * d.scale) / d.distance for d in found]
    if max(factors) - min(factors) < _SAME and max(left_over) < _ALONG:
        return _sample_finding(Fault.SCALED, f"{factors[0]:.7g} times the truth", step, names)
    if loss_is_wrong:
        factor = deviations[QuantityKind.LOSS.of()][step].factor
        return _sample_finding(Fault.FORWARD, f"the loss is {factor:.6g} times the truth; {_ADVICE}", step, names)
    return _sample_finding(Fault.BACKWARD, f"the loss is right; {_ADVICE}", step, names)


def _sample_finding(fault: Fault, detail: str, step: int, names: list[str]) -> Diagnosis:
    return Diagnosis(fault=fault, step=step, names=names[:MOST_NAMES], num_names=len(names), detail=detail)
