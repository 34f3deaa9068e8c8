"""Diagnose a pipeline that does not wait: which versions of the weights its gradients are computed at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from meshmark.algorithms.contract import GradientRule
from meshmark.algorithms.replicas import LEFT_OVER
from meshmark.judge.deviation import Deviations, QuantityKind, Tensors
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault
from meshmark.judge.tolerance_model import ToleranceModel
from meshmark.judge.trace import Trace, observed_run
from meshmark.judge.truth import MOST_PAST, exact_pipelined_step, local_rules
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case


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
