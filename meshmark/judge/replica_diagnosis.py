"""Diagnose the likely class of a defect in a run whose replicas may differ, and where it begins.

`diagnose` handles what is wrong in one replica, independently of the algorithm. This module handles the algorithm:
which replicas' parts gradients are made of, and other ways of averaging parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from meshmark.algorithms.replicas import LEFT_OVER, SAME, averaged, flat, listed
from meshmark.judge.deviation import Deviations, Drift, Quantity, QuantityKind, global_norm
from meshmark.judge.diagnosis import diagnose
from meshmark.judge.failed_replicas import FailedReplicas
from meshmark.judge.failed_step import Explanation
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault
from meshmark.judge.pipeline_diagnosis import diagnose_pipeline
from meshmark.judge.replays import Replays
from meshmark.judge.replicas import by_replica, num_replicas, replica_of
from meshmark.judge.tolerance_model import ToleranceModel
from meshmark.judge.trace import Trace
from meshmark.judge.truth import exact_gradients, local_rules
from meshmark.judge.twin import Twin
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case


def diagnose_replicas(
    case: Case,
    traces: Sequence[Trace],
    deviations: Deviations,
    drifts: Sequence[Drift],
    tolerance_model: ToleranceModel,
    twin: Twin | None = None,
) -> Diagnosis | None:
    """Return the diagnosis, or None when nothing is wrong. A single trace means that all replicas must be equal."""
    if num_replicas(case) == 1:
        of_older_weights = case.workload.algorithm.stale_weights and not drifts
        stale = diagnose_pipeline(case, traces[0], deviations, tolerance_model) if of_older_weights else None
        return stale or diagnose(case, traces[0], deviations, drifts, tolerance_model, twin)
    alone = by_replica(deviations, len(traces))
    tolerance_models = tolerance_model.fitted_to(deviations).of_replicas(len(traces))

    def of_one(replica: int, drifts: Sequence[Drift] = ()) -> Diagnosis | None:
        return diagnose(case, traces[replica], alone[replica], drifts, tolerance_models[replica])

    for replica, found in enumerate(alone):
        if any(q.kind is QuantityKind.INITIAL and steps[0].distance for q, steps in found.items()):
            return of_one(replica)
    if drifts:
        return of_one(min(replica_of(case.layout, rank) for drift in drifts for rank in drift.ranks), drifts)
    failed = _first(case, traces, alone, tolerance_models)
    if failed is None:
        return None
    worst = max(failed.wrong, key=lambda replica: max(failed.wrong[replica].values()))
    if gradients := failed.names(
        QuantityKind.GRADIENTS, QuantityKind.SCALE, QuantityKind.TWIN, QuantityKind.TWIN_SCALE
    ):
        explained = _parts(failed, gradients) or (Fault.BACKWARD, "of no weighing of the replicas' parts")
        return _diagnosis(failed, explained, gradients)
    updates = failed.names(QuantityKind.PARAMETERS)
    algorithm = case.workload.algorithm
    if updates and not algorithm.steps_on_local_gradients:  # then the norm is of what all step on
        return _diagnosis(failed, _explain_update(failed, updates) or _UNEXPLAINED, updates)
    if norms := [replica for replica, excesses in failed.wrong.items() if QuantityKind.NORM.of() in excesses]:
        reduced = _norm_of_mean(failed, norms[0])
        return _diagnosis(failed, reduced, updates) if reduced else of_one(norms[0])
    if updates:
        for replica, names in updates.items():
            if not traces[replica].parameters[failed.step + 1].keys() >= set(names):
                return of_one(replica)
        if fault := _explain_update(failed, updates):
            return _diagnosis(failed, fault, updates)
        if algorithm.steps_alone(failed.step):
            return of_one(next(iter(updates)))
        return _diagnosis(failed, _UNEXPLAINED, updates)
    return of_one(worst)


def _first(
    case: Case, traces: Sequence[Trace], alone: Sequence[Deviations], tolerance_models: Sequence[ToleranceModel]
) -> FailedReplicas | None:
    wrong = [
        (step, replica, quantity, excess)
        for replica, (found, stick) in enumerate(zip(alone, tolerance_models, strict=True))
        for excess, quantity, step in stick.judge(found)
        if not excess <= 1
    ]
    if not wrong:
        return None
    first = min(step for step, *_ in wrong)
    here: dict[int, dict[Quantity, float]] = {}
    for step, replica, quantity, excess in wrong:
        if step == first:
            here.setdefault(replica, {})[quantity] = excess
    return FailedReplicas(case=case, traces=traces, tolerance_models=tolerance_models, step=first, wrong=here)


def _diagnosis(failed: FailedReplicas, explained: Explanation, names: dict[int, list[str]]) -> Diagnosis:
    fault, detail = explained
    layout, wrong = failed.case.layout, list(dict.fromkeys(name for each in names.values() for name in each))
    ranks = [rank for rank in range(layout.world_size) if replica_of(layout, rank) in names]
    return Diagnosis(
        fault=fault,
        step=failed.step,
        names=wrong[:MOST_NAMES],
        num_names=len(wrong),
        ranks=ranks if len(ranks) < layout.world_size else [],
        detail=detail,
    )


def _parts(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation | None:
    """Explain a wrong gradient by the weights of the replicas' parts in it."""
    case, layout, batch = failed.case, failed.case.layout, make_batch(failed.case.workload, failed.step)
    algorithm = case.workload.algorithm.transition(case.workload, local_rules(case.workload, len(failed.traces)))
    replica = next(iter(wrong))
    names, own = wrong[replica], failed.traces[replica].gradients[failed.step]
    if any(name not in own or not np.any(own[name]) for name in names):
        return Fault.MISSING, f"some of {len(names)} wrong gradients of replica {replica} are absent or all zero"
    parts = [
        exact_gradients(case.workload, trace.parameters[failed.step], algorithm.part(batch, r)).gradients
        for r, trace in enumerate(failed.traces)
    ]
    basis = np.stack([flat(part, names) for part in parts], axis=1)
    told = flat(own, names)
    weights = [float(weight) for weight in np.linalg.lstsq(basis, told, rcond=None)[0]]
    if np.linalg.norm(told - basis @ weights) > LEFT_OVER * np.linalg.norm(told):
        return None
    reduces = failed.case.workload.algorithm.reduces_gradients(failed.step)
    (times,) = algorithm.reported([{"x": np.ones(1)}] * layout.dp)[replica].values()
    right = [1.0 if reduces else float(times[0]) * (r == replica) for r in range(layout.dp)]
    taken = f"replica {replica} steps on {listed(weights)} times the replicas' parts of the gradient"
    detail = f"{taken}, where {listed(right)} is right"
    others = float(np.abs(np.delete(weights, replica)).max()) > LEFT_OVER
    if others and not reduces:
        return Fault.ALGORITHM, f"gradients are reduced in a step that each replica takes alone: {detail}"
    if reduces and not others:
        return Fault.NOT_REDUCED, detail
    return (Fault.UNEVEN if reduces else Fault.SCALED), detail


_UNEXPLAINED: Explanation = (
    Fault.UNEXPLAINED,
    "the gradients are right, and no known fault of the algorithm and no other update rule explains the parameters",
)


def _explain_update(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation | None:
    """Return what explains wrong parameters after right gradients; None where nothing that is known does.

    `wrong` has the names of wrong parameters by replica, the worst first.
    """
    algorithm, replays = failed.case.workload.algorithm, Replays(failed, wrong)
    if cannot := algorithm.contradiction(replays.run, failed.step):
        return Fault.ALGORITHM, cannot
    # A step that a replica makes alone is explained best as that of one process, by `diagnose`.
    rules = () if algorithm.steps_alone(failed.step) else replays.of_rules()
    return replays.longest(itertools.chain(replays.of_faults(), rules))


def _norm_of_mean(failed: FailedReplicas, replica: int) -> Explanation | None:
    """Explain a reported norm that is of the mean over all replicas, and not of the replica's own gradients."""
    mean = global_norm(averaged([trace.gradients[failed.step] for trace in failed.traces])[replica])
    reported = failed.traces[replica].norms[failed.step] or 0.0
    if not abs(reported - mean) <= SAME * mean:
        return None
    return Fault.ALGORITHM, f"the norm that replica {replica} tells is that of the mean of all replicas' gradients"
