"""What is wrong with parameters where DiLoCo's replicas meet: when, on what they step, or the inner rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshmark.algorithms.local_sgd import DiLoCo, LocalSGD
from meshmark.algorithms.replicas import Algorithm, Tensors, UpdateRule, averaged, combined
from meshmark.judge.failed_replicas import FailedReplicas
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.replays import Account, Replays
from meshmark.spec.algorithm import AlgorithmSpec
from meshmark.spec.workload import Workload


class _Late(DiLoCo):
    """A step after the right one."""

    class _Spec(AlgorithmSpec):
        def averages_after(self, step: int) -> bool:
            return super().averages_after(step - 1)

    def __init__(self, spec: AlgorithmSpec, rules: Sequence[UpdateRule]) -> None:
        super().__init__(self._Spec(kind=spec.kind, period=spec.period), rules)


class _Never(DiLoCo):
    def outer(self, after: Sequence[Tensors]) -> list[Tensors]:
        return list(after)


class _Reset(DiLoCo):
    def gathered(self, drift: Tensors) -> Tensors:
        return drift


class _HeavyBall(DiLoCo):
    def outer(self, after: Sequence[Tensors]) -> list[Tensors]:
        assert self.met is not None
        self.momentum = self.gathered(combined((1, self.met), (-1, averaged(after)[0])))
        return [combined((1, self.met), (-self.spec.outer_rate, self.momentum)) for _ in after]


class _Alone(DiLoCo):
    def outer(self, after: Sequence[Tensors]) -> list[Tensors]:
        """Each replica on its own drift; of the momenta, that of the first is followed."""
        before, found = self.momentum, []
        for own in reversed(after):
            self.momentum = before
            found.append(super().outer([own])[0])
        return found[::-1]


class _FromMean(DiLoCo):
    def outer(self, after: Sequence[Tensors]) -> list[Tensors]:
        assert self.met is not None
        there, mean = super().outer(after)[0], averaged(after)[0]
        return [combined((1, mean), (1, there), (-1, self.met)) for _ in after]


def _of(cls: type[LocalSGD]) -> Callable[[Workload, Sequence[UpdateRule]], Algorithm]:
    return lambda workload, rules: cls(workload.algorithm, rules)


def _plain(workload: Workload, rules: Sequence[UpdateRule]) -> Algorithm:
    return DiLoCo(replace(workload.algorithm, outer_momentum=0.0), rules)


_RIVALS: dict[str, Callable[[Workload, Sequence[UpdateRule]], Algorithm]] = {
    "parameters are averaged, and no outer step is taken": _of(LocalSGD),
    "replicas never meet": _of(_Never),
    "replicas meet a step late": _of(_Late),
    "the outer momentum is reset": _of(_Reset),
    "without an outer momentum": _plain,
    "the outer momentum is not Nesterov's": _of(_HeavyBall),
    "each replica steps on its own drift": _of(_Alone),
    "the outer step is taken from the mean, not from where replicas last met": _of(_FromMean),
}


def explain_outer(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation:
    """`wrong`: parameters by replica, the worst first."""
    replays = Replays(failed, wrong, _of(DiLoCo))

    def accounts() -> Iterator[Account]:
        for how, rival in _RIVALS.items():
            yield replays.explained(rival), (Fault.ALGORITHM, how)
        yield from replays.of_rules()

    unknown = "the gradients are right, and no known way of meeting under any known update rule is this"
    return replays.longest(accounts()) or (Fault.UNEXPLAINED, unknown)
