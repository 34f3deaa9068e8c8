"""Names the likely class of what is wrong with a run whose replicas may differ, and where it begins.

What is wrong of one replica alone, whatever the algorithm, `diagnose` names. What is the algorithm's own is explained
here: gradients by the parts of which replicas they are made, and parameters by another way of averaging them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshmark.algorithms.replicas import UpdateRule, averaged
from meshmark.algorithms.table import build_algorithm
from meshmark.judge.compression_diagnosis import explain_compression
from meshmark.judge.deviation import Deviations, Drift, Quantity, QuantityKind, Tensors, global_norm
from meshmark.judge.diagnosis import diagnose
from meshmark.judge.failed_replicas import LEFT_OVER, SAME, FailedReplicas, flat, listed, misfit
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.mixing_diagnosis import explain_mixing
from meshmark.judge.outer_diagnosis import explain_outer
from meshmark.judge.replicas import by_replica, num_replicas, replica_of
from meshmark.judge.server_diagnosis import explain_server
from meshmark.judge.stale_diagnosis import diagnose_stale
from meshmark.judge.trace import Trace
from meshmark.judge.truth import ExactOptimizer, exact_gradients
from meshmark.judge.twin import Twin
from meshmark.judge.update_rivals import rivals
from meshmark.judge.weighing_diagnosis import explain_weighing
from meshmark.judge.yardstick import Yardstick
from meshmark.reference.data import make_batch
from meshmark.spec.algorithm import COMPRESSING, STALE, AlgorithmKind
from meshmark.spec.case import Case


def diagnose_replicas(
    case: Case,
    traces: Sequence[Trace],
    deviations: Deviations,
    drifts: Sequence[Drift],
    yardstick: Yardstick,
    twin: Twin | None = None,
) -> Diagnosis | None:
    """None when nothing is wrong. One trace alone is a run whose replicas are all to be the same."""
    if num_replicas(case) == 1:
        by_versions = case.workload.algorithm.kind in STALE and not drifts
        stale = diagnose_stale(case, traces[0], deviations, yardstick) if by_versions else None
        return stale or diagnose(case, traces[0], deviations, drifts, yardstick, twin)
    alone = by_replica(deviations, len(traces))
    sticks = yardstick.fitted_to(deviations).of_replicas(len(traces))

    def of_one(replica: int, drifts: Sequence[Drift] = ()) -> Diagnosis | None:
        return diagnose(case, traces[replica], alone[replica], drifts, sticks[replica])

    for replica, found in enumerate(alone):
        if any(q.kind is QuantityKind.INITIAL and steps[0].distance for q, steps in found.items()):
            return of_one(replica)
    if drifts:
        return of_one(min(replica_of(case.layout, rank) for drift in drifts for rank in drift.ranks), drifts)
    failed = _first(case, traces, alone, sticks)
    if failed is None:
        return None
    worst = max(failed.wrong, key=lambda replica: max(failed.wrong[replica].values()))
    if gradients := failed.names(
        QuantityKind.GRADIENTS, QuantityKind.SCALE, QuantityKind.TWIN, QuantityKind.TWIN_SCALE
    ):
        explained = _parts(failed, gradients) or (Fault.BACKWARD, "of no weighing of the replicas' parts")
        return _diagnosis(failed, explained, gradients)
    updates = failed.names(QuantityKind.PARAMETERS)
    if updates and case.workload.algorithm.kind in COMPRESSING:  # whose norm is of what all step on
        return _diagnosis(failed, explain_compression(failed, updates), updates)
    if norms := [replica for replica, excesses in failed.wrong.items() if QuantityKind.NORM.of() in excesses]:
        reduced = _norm_of_mean(failed, norms[0])
        return _diagnosis(failed, reduced, updates) if reduced else of_one(norms[0])
    if updates:
        for replica, names in updates.items():
            if not traces[replica].parameters[failed.step + 1].keys() >= set(names):
                return of_one(replica)
        if case.workload.algorithm.graph:
            return _diagnosis(failed, explain_mixing(failed, updates), updates)
        if case.workload.algorithm.server:
            return _diagnosis(failed, explain_server(failed, updates), updates)
        if case.workload.algorithm.kind is AlgorithmKind.DILOCO:
            return _diagnosis(failed, explain_outer(failed, updates), updates)
        if case.workload.algorithm.kind is AlgorithmKind.FED_AVG:
            return _diagnosis(failed, explain_weighing(failed, updates), updates)
        if averaging := _averaging(failed, updates):
            return _diagnosis(failed, averaging, updates)
        if not case.workload.algorithm.averages_after(failed.step):
            return of_one(next(iter(updates)))
        unknown = Fault.UNEXPLAINED, "the gradients are right, and the mean of no known update rule is this"
        return _diagnosis(failed, _rule(failed, updates) or unknown, updates)
    return of_one(worst)


def _first(
    case: Case, traces: Sequence[Trace], alone: Sequence[Deviations], sticks: Sequence[Yardstick]
) -> FailedReplicas | None:
    wrong = [
        (step, replica, quantity, excess)
        for replica, (found, stick) in enumerate(zip(alone, sticks, strict=True))
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
    return FailedReplicas(case=case, traces=traces, sticks=sticks, step=first, wrong=here)


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
    """By how much of each replica's part a wrong gradient is made of."""
    case, layout, batch = failed.case, failed.case.layout, make_batch(failed.case.workload, failed.step)
    algorithm = build_algorithm(case.workload, [ExactOptimizer(case.workload.optimizer) for _ in failed.traces])
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


def _averaging(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation | None:
    """Another way of averaging, or none, that puts every wrong parameter where it is."""
    step, due = failed.step, failed.case.workload.algorithm.averages_after(failed.step)
    own = [trace.gradients[step] for trace in failed.traces]
    alone = _replay(failed, own)
    exact = averaged(alone) if due else alone

    def fits(there: Sequence[Tensors]) -> bool:
        return misfit(failed, wrong, exact, there) <= 1

    if due and fits(alone):
        return Fault.ALGORITHM, f"the mean over replicas that is due after this step is not taken{_later(failed)}"
    if not due and fits(averaged(alone)):
        return Fault.ALGORITHM, "parameters are averaged after this step, where no averaging is due"
    for how, there in _rivals(failed, alone, own):
        if fits(there):
            return Fault.ALGORITHM, how
    return None


def _rule(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation | None:
    """Another update rule of every replica, before the right averaging: the closest, if it is close enough."""
    spec, own = failed.case.workload.optimizer, [trace.gradients[failed.step] for trace in failed.traces]
    exact = averaged(_replay(failed, own))
    found: list[tuple[float, Explanation]] = []
    for every in zip(*(rivals(spec, failed.step) for _ in own), strict=True):
        if every[0].gradients is None:
            there = averaged(_replay(failed, own, [rival.optimizer for rival in every]))
            found.append((misfit(failed, wrong, exact, there), (every[0].fault, every[0].detail)))
    before = averaged([trace.parameters[failed.step] for trace in failed.traces])
    replica, names = next(iter(wrong.items()))
    moved = flat(failed.traces[replica].parameters[failed.step + 1], names) - flat(before[replica], names)
    right = flat(exact[replica], names) - flat(before[replica], names)
    factor = float(moved @ right / (right @ right)) if right.any() else 0.0
    there = [{n: before[r][n] + factor * (x - before[r][n]) for n, x in t.items()} for r, t in enumerate(exact)]
    found.append((misfit(failed, wrong, exact, there), (Fault.UPDATE, f"{factor:.4g} times the right step")))
    closest, explained = min(found, key=lambda pair: pair[0])
    return explained if closest <= 1 else None


def _norm_of_mean(failed: FailedReplicas, replica: int) -> Explanation | None:
    """The norm reported is not of the replica's own gradients, but of all replicas' mean."""
    mean = global_norm(averaged([trace.gradients[failed.step] for trace in failed.traces])[replica])
    reported = failed.traces[replica].norms[failed.step] or 0.0
    if not abs(reported - mean) <= SAME * mean:
        return None
    return Fault.ALGORITHM, f"the norm that replica {replica} tells is that of the mean of all replicas' gradients"


def _replay(
    failed: FailedReplicas, last: Sequence[Tensors], rules: Sequence[UpdateRule] | None = None
) -> list[Tensors]:
    """Where each replica's own optimizer, by default the float64 one, puts it after the failed step, in which it is
    given `last`."""
    found, uses = [], failed.case.workload.uses
    every = rules or [ExactOptimizer(failed.case.workload.optimizer) for _ in last]
    for trace, gradients, rule in zip(failed.traces, last, every, strict=True):
        after: Tensors = {}
        for step, reported in enumerate([*trace.gradients[: failed.step], gradients]):
            own = {name: g for name, g in reported.items() if uses(name, step)}
            after = rule.step(trace.parameters[step], own)
        found.append(after)
    return found


def _rivals(
    failed: FailedReplicas, alone: list[Tensors], own: Sequence[Tensors]
) -> Iterator[tuple[str, Sequence[Tensors]]]:
    """Other means, and what they make of the parameters to which each replica came `alone`."""
    count = len(alone)
    yield "made of the mean of the replicas' gradients, and parameters are not averaged", _replay(failed, averaged(own))
    yield "the sum over replicas, not their mean", [{n: count * x for n, x in t.items()} for t in averaged(alone)]
    for size in (size for size in range(2, count) if count % size == 0):
        neighbours = [list(range(i, i + size)) for i in range(0, count, size)]
        strided = [list(range(i, count, count // size)) for i in range(count // size)]
        for groups in (neighbours, strided):
            means = {r: averaged([alone[peer] for peer in group])[0] for group in groups for r in group}
            yield f"averaged over groups of replicas, {groups}, not over all", [means[r] for r in range(count)]


def _later(failed: FailedReplicas) -> str:
    """The first later step after which the replicas do stand together, though none is due."""
    algorithm, first = failed.case.workload.algorithm, failed.traces[0]
    for step in range(failed.step + 1, len(first.gradients)):
        here = first.parameters[step + 1]
        together = all(
            name in trace.parameters[step + 1]
            and np.allclose(trace.parameters[step + 1][name], here[name], rtol=1e-6, atol=0)
            for trace in failed.traces
            for name in here
        )
        if together:
            late = f", but {step - failed.step} late, after step {step}"
            return "" if algorithm.averages_after(step) else late
    return ", nor after any later step"
