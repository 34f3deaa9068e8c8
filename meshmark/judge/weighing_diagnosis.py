"""What is wrong with parameters where FedAvg's replicas meet: when, by which weights, or the local rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshmark.algorithms.local_sgd import FedAvg
from meshmark.algorithms.replicas import Algorithm, Tensors, UpdateRule, averaged, mixed
from meshmark.judge.failed_replicas import FailedReplicas
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.replays import Account, Replays, Transitions
from meshmark.spec.algorithm import AlgorithmSpec
from meshmark.spec.workload import Workload


class _Even(FedAvg):
    def weighed(self, after: Sequence[Tensors]) -> list[Tensors]:
        return averaged(after)


class _Never(FedAvg):
    def weighed(self, after: Sequence[Tensors]) -> list[Tensors]:
        return list(after)


class _Late(FedAvg):
    """A step after the right one."""

    class _Spec(AlgorithmSpec):
        def averages_after(self, step: int) -> bool:
            return super().averages_after(step - 1)

    def __init__(self, spec: AlgorithmSpec, rules: Sequence[UpdateRule]) -> None:
        super().__init__(self._Spec(kind=spec.kind, period=spec.period), rules)


class _OfOthers(FedAvg):
    def weighed(self, after: Sequence[Tensors]) -> list[Tensors]:
        return mixed([self.shares[1:] + self.shares[:1]] * len(after), after)


class _Squared(FedAvg):
    """Weighed, of what was weighed."""

    def weighed(self, after: Sequence[Tensors]) -> list[Tensors]:
        return mixed([[share**2 for share in self.shares]] * len(after), after)


def _of(cls: type[FedAvg]) -> Transitions:
    def built(workload: Workload, rules: Sequence[UpdateRule]) -> Algorithm:
        return cls(workload.algorithm, rules)

    return built


_RIVALS: dict[str, type[FedAvg]] = {
    "all replicas weigh alike, however many rows they have": _Even,
    "replicas never meet": _Never,
    "replicas meet a step late": _Late,
    "each replica weighs by the rows of the next": _OfOthers,
    "replicas are weighed by their rows twice": _Squared,
}


def explain_weighing(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation:
    """`wrong`: parameters by replica, the worst first."""
    replays = Replays(failed, wrong, _of(FedAvg))

    def accounts() -> Iterator[Account]:
        for how, rival in _RIVALS.items():
            yield replays.explained(_of(rival)), (Fault.ALGORITHM, how)
        yield from replays.of_rules()

    unknown = "the gradients are right, and no known way of weighing under any known update rule is this"
    return replays.longest(accounts()) or (Fault.UNEXPLAINED, unknown)
