"""What is wrong with a pipeline that does not wait: which versions of the weights its gradients are of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from meshmark.algorithms.pipemare import PipeMare
from meshmark.algorithms.stale import Versions, prescribed
from meshmark.judge.deviation import Deviations, QuantityKind, Tensors
from meshmark.judge.failed_replicas import LEFT_OVER
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault
from meshmark.judge.pipemare_rivals import PIPEMARE_RIVALS
from meshmark.judge.trace import Trace
from meshmark.judge.truth import MOST_PAST, ExactOptimizer, exact_pipemare_step, exact_stale_step
from meshmark.judge.yardstick import Yardstick
from meshmark.reference.data import make_batch
from meshmark.spec.algorithm import AlgorithmKind
from meshmark.spec.case import Case


def diagnose_stale(case: Case, trace: Trace, deviations: Deviations, yardstick: Yardstick) -> Diagnosis | None:
    """None where no other versions explain the first step at which anything is wrong."""
    wrong = [(step, q) for excess, q, step in yardstick.judge(deviations) if not excess <= 1]
    first = min((step for step, _ in wrong), default=0)
    names = {
        kind: [q.name for step, q in wrong if step == first and q.kind is kind]
        for kind in (QuantityKind.GRADIENTS, QuantityKind.PARAMETERS)
    }
    if gradients := names[QuantityKind.GRADIENTS]:
        explains = _of_gradients(case, trace, first, gradients, yardstick)
    elif updates := names[QuantityKind.PARAMETERS]:
        gradients, explains = updates, _of_update(case, trace, first, updates)
    else:
        return None
    if explains is None:
        return None
    return Diagnosis(
        fault=Fault.ALGORITHM, step=first, names=gradients[:MOST_NAMES], num_names=len(gradients), detail=explains
    )


def _of_gradients(case: Case, trace: Trace, step: int, names: list[str], yardstick: Yardstick) -> str | None:
    past, batch = trace.parameters[max(0, step + 1 - MOST_PAST) : step + 1], make_batch(case.workload, step)
    tolerances = {name: yardstick.tolerance(QuantityKind.GRADIENTS.of(name), step) for name in names}
    if case.workload.algorithm.kind is AlgorithmKind.PIPEMARE:
        exact = _replayed(case, trace, step, PipeMare)
        late = ((how, _replayed(case, trace, step, rival)) for rival, how in PIPEMARE_RIVALS.items())
        return _first_that_fits(late, exact, trace.gradients[step], tolerances)

    def gradients(versions: Versions | None, stashed: bool = True) -> Tensors:
        return exact_stale_step(case.workload, past, batch, case.layout, versions, stashed).gradients

    def accounts() -> Iterator[tuple[str, Tensors]]:
        for how, versions in rival_versions(case):
            yield how, gradients(versions)
        yield "backward passes take the newest weights, not those of the forward passes", gradients(None, False)

    return _first_that_fits(accounts(), gradients(None), trace.gradients[step], tolerances)


def _replayed(case: Case, trace: Trace, step: int, kind: type[PipeMare]) -> Tensors:
    """The gradients of `step`, where velocities are of all updates before it."""
    run = kind(case.workload, case.layout)
    for index in range(step):
        exact_pipemare_step(run, trace.parameters[index], make_batch(case.workload, index))
    return exact_pipemare_step(run, trace.parameters[step], make_batch(case.workload, step)).gradients


def _first_that_fits(
    accounts: Iterable[tuple[str, Tensors]], exact: Tensors, told: Tensors, tolerances: Mapping[str, float]
) -> str | None:
    """`tolerances`: by the names of what is wrong."""
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
    """The right gradients change the weights that they are of, not the newest."""
    if case.workload.algorithm.kind is not AlgorithmKind.PIPEDREAM_2BW or step == 0:
        return None
    rule = ExactOptimizer(case.workload.optimizer)
    older: Tensors = {}
    exact: Tensors = {}
    for index in range(step + 1):
        newest, own = trace.parameters[index], trace.gradients[index]
        before = trace.parameters[max(index - 1, 0)]
        exact = rule.step(newest, own)
        older = {name: before[name] + (exact[name] - newest[name]) for name in names}
    after = trace.parameters[step + 1]
    fits = all(
        np.linalg.norm(after[name] - older[name]) <= LEFT_OVER * float(np.linalg.norm(after[name] - exact[name]))
        for name in names
    )
    return "the update changes the weights of the step before, not the newest" if fits else None


def rival_versions(case: Case) -> Iterator[tuple[str, Versions]]:
    """Each with what it says of a run that it explains."""
    kind, depth = case.workload.algorithm.kind, case.layout.pp
    right = prescribed(kind, depth)
    delayed = kind is AlgorithmKind.PIPEDREAM_2BW
    older = 1 if delayed else -1

    def shifted(by: int, stages: range) -> Versions:
        return lambda stage, index: max(0, right(stage, index) + by * (stage in stages))

    every = range(depth)
    if not delayed:
        yield "every micro-batch is of the weights that the step began with", lambda stage, index: 0
        yield "every micro-batch is of the newest weights, as if none were on their way", lambda stage, index: index
    yield "weights are a version too old at every stage", shifted(older, every)
    yield "weights are a version too new at every stage", shifted(-older, every)
    if not delayed:
        other = {AlgorithmKind.PIPEDREAM: AlgorithmKind.PIPEDREAM_VERTICAL}.get(kind, AlgorithmKind.PIPEDREAM)
        yield f"versions are those of {other}", prescribed(other, depth)
    for stage in every:
        yield f"weights of stage {stage} alone are a version too old", shifted(older, range(stage, stage + 1))
        yield f"weights of stage {stage} alone are a version too new", shifted(-older, range(stage, stage + 1))
