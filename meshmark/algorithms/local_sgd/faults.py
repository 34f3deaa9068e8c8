"""How local SGD, DiLoCo and FedAvg are got wrong: when replicas meet, by which weights, and on what they step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meshmark.algorithms.contract import (
    FaultHypothesis,
    ObservedRun,
    Tensors,
    Transition,
    UpdateRule,
    averaged,
    combined,
    mixed,
)
from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.algorithms.local_sgd.transition import DiLoCoTransition, FedAvgTransition, LocalSGDTransition
from meshmark.spec.workload import Workload

_SAME = 1e-6
"""Replicas whose parameters differ by less, relative to these, are together."""


class _Never(LocalSGDTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return list(after)


class _Always(LocalSGDTransition):
    def meets_after(self, step: int) -> bool:
        return True


class _OfGradients(LocalSGDTransition):
    """Every replica steps on the mean gradient where a meeting is due, and parameters are not averaged."""

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        given = averaged(gradients) if self.meets_after(self.steps) else gradients
        self.steps += 1
        return self.alone(parameters, given)


class _Sum(LocalSGDTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return [{n: len(after) * x for n, x in tensors.items()} for tensors in super().meet(after)]


def _late(steps: int) -> type[LocalSGDTransition]:
    class Late(LocalSGDTransition):
        def meets_after(self, step: int) -> bool:
            return super().meets_after(step - steps)

    return Late


def _in_groups(groups: Sequence[Sequence[int]]) -> type[LocalSGDTransition]:
    class InGroups(LocalSGDTransition):
        def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
            means = {r: averaged([after[peer] for peer in group])[0] for group in groups for r in group}
            return [means[r] for r in range(len(after))]

    return InGroups


def local_sgd_faults(algorithm: LocalSGD, run: ObservedRun) -> Iterator[FaultHypothesis]:
    step, last = run.failed_step, len(run.gradients[0])
    missing = "the mean over replicas that is due after this step is not taken"
    if algorithm.averages_after(step):
        for later in range(step + 1, last):
            if _together(run, later) and not algorithm.averages_after(later):
                late = later - step
                yield FaultHypothesis(f"{missing}, but {late} late, after step {later}", _late(late))
                break
        never = not any(_together(run, later) for later in range(step + 1, last))
        yield FaultHypothesis(f"{missing}, nor after any later step" if never else missing, _Never)
    else:
        yield FaultHypothesis("parameters are averaged after this step, where no averaging is due", _Always)
    yield FaultHypothesis("made of the mean of the replicas' gradients, and parameters are not averaged", _OfGradients)
    yield FaultHypothesis("the sum over replicas, not their mean", _Sum)
    count = len(run.gradients)
    for size in (size for size in range(2, count) if count % size == 0):
        neighbours = [list(range(i, i + size)) for i in range(0, count, size)]
        strided = [list(range(i, count, count // size)) for i in range(count // size)]
        for groups in (neighbours, strided):
            yield FaultHypothesis(f"averaged over groups of replicas, {groups}, not over all", _in_groups(groups))


def _together(run: ObservedRun, step: int) -> bool:
    """Return whether all replicas have the same parameters after `step`."""
    first, *others = (replica[step + 1] for replica in run.parameters)
    return all(
        name in there and np.allclose(there[name], first[name], rtol=_SAME, atol=0)
        for there in others
        for name in first
    )


class _OuterLate(DiLoCoTransition):
    def meets_after(self, step: int) -> bool:
        return super().meets_after(step - 1)


class _OuterNever(DiLoCoTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return list(after)


class _Reset(DiLoCoTransition):
    def next_momentum(self, drift: Tensors) -> Tensors:
        return drift


class _WithoutMomentum(DiLoCoTransition):
    def __init__(self, workload: Workload, rules: Sequence[UpdateRule]) -> None:
        super().__init__(workload, rules)
        self.outer_momentum = 0.0


class _HeavyBall(DiLoCoTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        assert self.met is not None
        self.momentum = self.next_momentum(combined((1, self.met), (-1, averaged(after)[0])))
        return [combined((1, self.met), (-self.outer_rate, self.momentum)) for _ in after]


class _Alone(DiLoCoTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        """Each replica steps on its own drift; of the momenta, that of the first is followed."""
        before, found = self.momentum, []
        for local in reversed(after):
            self.momentum = before
            found.append(super().meet([local])[0])
        return found[::-1]


class _FromMean(DiLoCoTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        assert self.met is not None
        there, mean = super().meet(after)[0], averaged(after)[0]
        return [combined((1, mean), (1, there), (-1, self.met)) for _ in after]


_DILOCO: dict[str, Callable[[Workload, Sequence[UpdateRule]], Transition]] = {
    "parameters are averaged, and no outer step is taken": LocalSGDTransition,
    "replicas never meet": _OuterNever,
    "replicas meet a step late": _OuterLate,
    "the outer momentum is reset": _Reset,
    "without an outer momentum": _WithoutMomentum,
    "the outer momentum is not Nesterov's": _HeavyBall,
    "each replica steps on its own drift": _Alone,
    "the outer step is taken from the mean, not from where replicas last met": _FromMean,
}


def diloco_faults() -> Iterator[FaultHypothesis]:
    return (FaultHypothesis(how, wrong) for how, wrong in _DILOCO.items())


class _Even(FedAvgTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return averaged(after)


class _ClientsNever(FedAvgTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return list(after)


class _ClientsLate(FedAvgTransition):
    def meets_after(self, step: int) -> bool:
        return super().meets_after(step - 1)


class _OfOthers(FedAvgTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return mixed([self.shares[1:] + self.shares[:1]] * len(after), after)


class _Squared(FedAvgTransition):
    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return mixed([[share**2 for share in self.shares]] * len(after), after)


_FED_AVG: dict[str, type[FedAvgTransition]] = {
    "all replicas weigh alike, however many rows they have": _Even,
    "replicas never meet": _ClientsNever,
    "replicas meet a step late": _ClientsLate,
    "each replica weighs by the rows of the next": _OfOthers,
    "replicas are weighed by their rows twice": _Squared,
}


def fed_avg_faults() -> Iterator[FaultHypothesis]:
    return (FaultHypothesis(how, wrong) for how, wrong in _FED_AVG.items())
