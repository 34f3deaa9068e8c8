"""Diagnose the likely class of a defect in a run whose replicas may differ, and where it begins.

`diagnose` handles what is wrong in one replica, independently of the algorithm. This module handles the algorithm:
which replicas' parts gradients are made of, and other ways of averaging parameters. It replays the first wrong step
under accounts (hypotheses) of what the replicas do, and reports the one that explains it. For an asynchronous pipeline,
an account says which versions of the weights the gradients are computed with.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from meshmark.algorithms.contract import (
    LEFT_OVER,
    SAME,
    GradientRule,
    Tensors,
    Transition,
    UpdateRule,
    averaged,
    flat,
    listed,
)
from meshmark.judge.deviation import (
    Deviations,
    Drift,
    Quantity,
    QuantityKind,
    by_replica,
    global_norm,
    num_replicas,
    replica_of,
)
from meshmark.judge.diagnosis import diagnose
from meshmark.judge.failed_step import Explanation
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault
from meshmark.judge.tolerance_model import ToleranceModel
from meshmark.judge.trace import Trace, observed_run
from meshmark.judge.truth import MOST_PAST, ExactOptimizer, exact_gradients, exact_pipelined_step, local_rules
from meshmark.judge.twin import Twin
from meshmark.judge.update_hypotheses import update_hypotheses
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload
from meshmark.text import describe_error

# --- Diagnose a pipeline that does not wait: which versions of the weights its gradients are computed at.


def diagnose_pipeline(
    case: Case, trace: Trace, deviations: Deviations, tolerance_model: ToleranceModel
) -> Diagnosis | None:
    """Return the diagnosis, or None if no other versions explain the first wrong step."""
    wrong = [(step, q) for excess, q, step in tolerance_model.judge(deviations) if not excess <= 1]
    first = min((step for step, _ in wrong), default=0)
    names = {
        kind: [q.name for step, q in wrong if step == first and q.kind is kind]
        for kind in (QuantityKind.GRADIENTS, QuantityKind.PARAMETERS)
    }
    if gradients := names[QuantityKind.GRADIENTS]:
        explains = _of_gradients(case, trace, first, gradients, tolerance_model)
    elif updates := names[QuantityKind.PARAMETERS]:
        gradients, explains = updates, _of_update(case, trace, first, updates)
    else:
        return None
    if explains is None:
        return None
    return Diagnosis(
        fault=Fault.ALGORITHM, step=first, names=gradients[:MOST_NAMES], num_names=len(gradients), detail=explains
    )


def _of_gradients(case: Case, trace: Trace, step: int, names: list[str], tolerance_model: ToleranceModel) -> str | None:
    workload, layout = case.workload, case.layout
    tolerances = {name: tolerance_model.tolerance(QuantityKind.GRADIENTS.of(name), step) for name in names}
    right = workload.algorithm.gradient_rule(workload, layout)
    assert right is not None, f"{workload.algorithm.id} has no gradient rule"
    accounts = (
        (hypothesis.description, _gradients_by(hypothesis.rule(), case, trace, step))
        for hypothesis in workload.algorithm.gradient_hypotheses(workload, layout)
    )
    return _first_that_fits(accounts, _gradients_by(right, case, trace, step), trace.gradients[step], tolerances)


def _gradients_by(rule: GradientRule, case: Case, trace: Trace, step: int) -> Tensors:
    """Return the gradients of `step` by a rule, replayed from the first step because it may keep state."""
    found: Tensors = {}
    for index in range(step + 1):
        past = trace.parameters[max(0, index + 1 - MOST_PAST) : index + 1]
        batch = make_batch(case.workload, index)
        found = exact_pipelined_step(rule, case.workload, past, batch).gradients
    return found


def _first_that_fits(
    accounts: Iterable[tuple[str, Tensors]], exact: Tensors, told: Tensors, tolerances: Mapping[str, float]
) -> str | None:
    """Return the first account that fits. `tolerances` is by the names of wrong tensors."""
    for how, there in accounts:
        if all(
            np.linalg.norm(told[name] - there[name])
            <= max(tolerance, LEFT_OVER * float(np.linalg.norm(told[name] - exact[name])))
            for name, tolerance in tolerances.items()
            if name in told
        ):
            return how
    return None


def _of_update(case: Case, trace: Trace, step: int, names: list[str]) -> str | None:
    """Return what is wrong with an update by right gradients; None where no known fault explains it."""
    workload, after = case.workload, trace.parameters[step + 1]
    for hypothesis in workload.algorithm.fault_hypotheses(workload, observed_run([trace], step)):
        right = workload.algorithm.transition(workload, local_rules(workload, 1), num_stages=case.layout.pp)
        wrong = hypothesis.transition(workload, local_rules(workload, 1))
        exact: Tensors = {}
        there: Tensors = {}
        for index in range(step + 1):
            here, given = [trace.parameters[index]], [trace.gradients[index]]
            (exact,), (there,) = right.transition(here, given), wrong.transition(here, given)
        if all(
            np.linalg.norm(after[name] - there[name]) <= LEFT_OVER * float(np.linalg.norm(after[name] - exact[name]))
            for name in names
        ):
            return hypothesis.description
    return None


# --- The first wrong step of replicas that may differ, and how well another account of it fits.


@dataclass(frozen=True, kw_only=True)
class FailedReplicas:
    """The first step at which anything is wrong, for all replicas together."""

    case: Case
    traces: Sequence[Trace]
    tolerance_models: Sequence[ToleranceModel]
    """Tolerance models by replica, like the traces."""
    step: int
    wrong: dict[int, dict[Quantity, float]]
    """Excesses by replica, then quantity: distance from the truth in tolerances. Contains only replicas with any."""

    def names(self, *kinds: QuantityKind) -> dict[int, list[str]]:
        """Return the names of wrong tensors by replica, the worst first."""
        found = {}
        for replica, excesses in self.wrong.items():
            worst = sorted((q for q in excesses if q.kind in kinds), key=lambda q: -excesses[q])
            if worst:
                found[replica] = list(dict.fromkeys(q.name for q in worst))
        return found

    def at(self, step: int) -> tuple[list[Tensors], list[Tensors]]:
        """Return each replica's parameters before `step`, and its gradients."""
        uses = self.case.workload.uses
        own: list[Tensors] = [
            {n: g for n, g in trace.gradients[step].items() if uses(n, step)} for trace in self.traces
        ]
        return [trace.parameters[step] for trace in self.traces], own


def worst_excess(
    failed: FailedReplicas, wrong: dict[int, list[str]], exact: Sequence[Tensors], there: Sequence[Tensors]
) -> float:
    """Return how far the worst of the wrong parameters is from `there`. Up to 1, `there` explains the run."""
    after = [trace.parameters[failed.step + 1] for trace in failed.traces]
    return max(
        float(np.linalg.norm(after[r][name] - there[r][name]))
        / max(
            failed.tolerance_models[r].tolerance(QuantityKind.PARAMETERS.of(name), failed.step),
            LEFT_OVER * float(np.linalg.norm(after[r][name] - exact[r][name])),
        )
        for r, names in wrong.items()
        for name in names
    )


# --- Replay a failed run of replicas under other accounts of what they do, to find one that explains it.

Account = tuple[int, Explanation]
"""The number of steps explained from the failed one on, and the explanation."""
Transitions = Callable[[Workload, Sequence[UpdateRule]], Transition]
"""Makes a transition, right or wrong, from a workload and the replicas' optimizers."""


class Replays:
    """Finds the account that explains the most steps from the failed one on.

    One step is not enough: at the first, all replicas have the same parameters, and many accounts agree.
    """

    def __init__(self, failed: FailedReplicas, wrong: dict[int, list[str]]) -> None:
        """`wrong` has the names of wrong parameters by replica."""
        workload = failed.case.workload
        self.failed, self.wrong = failed, wrong
        self.run = observed_run(failed.traces, failed.step)
        self.spec = workload.algorithm.local_optimizer(workload.optimizer)
        self.exact = self.replayed(self.real)

    def real(self, workload: Workload, rules: Sequence[UpdateRule]) -> Transition:
        """Return the right transition, which follows what the run leaves to chance."""
        transition = workload.algorithm.transition(workload, rules)
        transition.follow(self.run)
        return transition

    def rules(self, spec: OptimizerSpec | None = None) -> list[UpdateRule]:
        return [ExactOptimizer(spec or self.spec) for _ in self.failed.traces]

    def replayed(self, kind: Transitions, rules: Sequence[UpdateRule] | None = None) -> list[list[Tensors]]:
        """Return where a transition puts each replica, by step."""
        algorithm = kind(self.failed.case.workload, rules or self.rules())
        return [algorithm.transition(*self.failed.at(step)) for step in range(self.num_steps)]

    @property
    def num_steps(self) -> int:
        return len(self.failed.traces[0].gradients)

    def explained(self, kind: Transitions, rules: Sequence[UpdateRule] | None = None) -> int:
        """Return how many steps are explained from the failed one on, without a gap."""
        there, steps = self.replayed(kind, rules), range(self.failed.step, self.num_steps)

        def explains(step: int) -> bool:
            return worst_excess(replace(self.failed, step=step), self.wrong, self.exact[step], there[step]) <= 1

        return next((s for s in steps if not explains(s)), self.num_steps) - self.failed.step

    def of_rules(self) -> Iterator[Account]:
        """Yield other update rules of every replica."""
        for every in zip(*(update_hypotheses(self.spec, self.failed.step) for _ in self.failed.traces), strict=True):
            if every[0].gradients is None:
                steps = self.explained(self.real, [rival.optimizer for rival in every])
                yield steps, (every[0].fault, every[0].detail)
        for factor in (2.0, 0.5, *self.fitted_factors()):
            rate = replace(self.spec, learning_rate=factor * self.spec.learning_rate)
            yield self.explained(self.real, self.rules(rate)), (Fault.UPDATE, f"{factor:.4g} times the right step")

    def fitted_factors(self) -> Iterator[float]:
        """Yield the worst replica's failed step as a multiple of the right step, if all replicas are averaged."""
        if not self.failed.case.workload.algorithm.averages_after(self.failed.step):
            return
        replica, names = next(iter(self.wrong.items()))
        step, traces = self.failed.step, self.failed.traces
        before = flat(averaged([trace.parameters[step] for trace in traces])[replica], names)
        moved = flat(traces[replica].parameters[step + 1], names) - before
        right = flat(self.exact[step][replica], names) - before
        if right.any() and (factor := float(moved @ right / (right @ right))) > 0:
            yield factor

    def of_faults(self) -> Iterator[Account]:
        """Yield the ways in which the algorithm is got wrong, and what is fitted to the run."""
        workload = self.failed.case.workload
        for hypothesis in workload.algorithm.fault_hypotheses(workload, self.run):
            yield self.explained(hypothesis.transition), (Fault.ALGORITHM, hypothesis.description)
        fresh = workload.algorithm.transition(workload, self.rules())
        if fitted := workload.algorithm.estimate_fault(workload, fresh, self.run, self.wrong, self.exact):
            steps, detail = fitted
            yield steps, (Fault.ALGORITHM, detail)

    def longest(self, accounts: Iterable[Account]) -> Explanation | None:
        """Return the account that explains the most steps, or None. The first that explains all ends the search."""
        most: int = 0
        best: Explanation | None = None
        for steps, account in accounts:
            if steps > most:
                most, best = steps, account
            if most == self.num_steps - self.failed.step:
                break
        return best


# --- Diagnose the likely class of a defect in a run whose replicas may differ, and where it begins.


def diagnose_replicas(
    case: Case,
    traces: Sequence[Trace],
    deviations: Deviations,
    drifts: Sequence[Drift],
    tolerance_model: ToleranceModel,
    twin: Twin | None = None,
) -> Diagnosis | None:
    """Return the diagnosis, or None when nothing is wrong. A single trace means that all replicas must be equal.

    A search for the cause that fails is no fault of the run's: what is wrong is then told without a cause.
    """
    try:
        return _diagnosed(case, traces, deviations, drifts, tolerance_model, twin)
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        print(f"the search for the cause failed: {describe_error(error)}", file=sys.stderr)
        return _unexplained(deviations, drifts, tolerance_model, error)


def _unexplained(
    deviations: Deviations, drifts: Sequence[Drift], tolerance_model: ToleranceModel, error: Exception
) -> Diagnosis | None:
    """Return the first symptoms of a wrong run, and why there is no cause. None when nothing is wrong."""
    wrong = [(step, -excess, q.name) for excess, q, step in tolerance_model.judge(deviations) if not excess <= 1]
    wrong += [(d.step, 0.0, d.quantity.name) for d in drifts]
    wrong += [(0, 0.0, q.name) for q, d in deviations.items() if q.kind is QuantityKind.INITIAL and d[0].distance]
    if not wrong:
        return None
    first = min(step for step, *_ in wrong)
    names = list(dict.fromkeys(name for step, _, name in sorted(wrong) if step == first and name))
    told = f"Meshmark's search for the cause failed ({describe_error(error)}); please report this"
    return Diagnosis(fault=Fault.UNEXPLAINED, step=first, names=names[:MOST_NAMES], num_names=len(names), detail=told)


def _diagnosed(
    case: Case,
    traces: Sequence[Trace],
    deviations: Deviations,
    drifts: Sequence[Drift],
    tolerance_model: ToleranceModel,
    twin: Twin | None = None,
) -> Diagnosis | None:
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
        if reduced is None and not algorithm.steps_on_local_gradients:  # the right norm is that of what all step on
            factor = alone[norms[0]][QuantityKind.NORM.of()][failed.step].factor
            reduced = Fault.CLIPPING, f"the reported norm is {factor:.9g} times the right one"
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
    """Explain a reported norm that is the norm of the mean gradients of all replicas, not of the replica's own."""
    mean = global_norm(averaged([trace.gradients[failed.step] for trace in failed.traces])[replica])
    reported = failed.traces[replica].norms[failed.step] or 0.0
    if not abs(reported - mean) <= SAME * mean:
        return None
    return Fault.ALGORITHM, f"the norm that replica {replica} tells is that of the mean of all replicas' gradients"
