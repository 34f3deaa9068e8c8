"""What is wrong with parameters that a server has made: the order that is told, what was pushed, or how it steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.downpour import Downpour, Push, Server, Told, gathered, impossible
from meshmark.algorithms.replicas import Algorithm, Tensors, UpdateRule
from meshmark.judge.failed_replicas import FailedReplicas
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.replays import Account, Replays, Transitions
from meshmark.judge.trace import told_of
from meshmark.spec.workload import Workload


class _Twice(Downpour):
    def server(self, start: Tensors) -> Server:
        class Twice(Server):
            def step(self, pushed: Tensors) -> None:
                super().step(pushed)
                super().step(pushed)

        return Twice(start, self.spec.rate)


class _Forgetful(Downpour):
    def server(self, start: Tensors) -> Server:
        class Forgetful(Server):
            def summed(self, before: NDArray[np.floating], u: NDArray[np.floating]) -> NDArray[np.floating]:
                square: NDArray[np.floating] = u * u
                return square

        return Forgetful(start, self.spec.rate)


class _Last(Downpour):
    def pushed(self, told: Told, replica: int, step: int) -> Tensors:
        return told.gradients[replica][step]


class _All(Downpour):
    def pushed(self, told: Told, replica: int, step: int) -> Tensors:
        return gathered(told.gradients[replica][: step + 1])


class _Late(Downpour):
    def pushed(self, told: Told, replica: int, step: int) -> Tensors:
        return super().pushed(told, replica, step - self.spec.push_every) if step else {}


class _OfOthers(Downpour):
    def pushed(self, told: Told, replica: int, step: int) -> Tensors:
        return super().pushed(told, (replica + 1) % len(told.versions), step)


class _Before(Downpour):
    def wanted(self, told: Told) -> set[int]:
        return {max(version - 1, 0) for version in super().wanted(told)}

    def version(self, told: int) -> int:
        return max(told - 1, 0)


class _NotTaken(Downpour):
    def followed(self, alone: Sequence[Tensors]) -> list[Tensors]:
        return list(alone)


class _Idle(Downpour):
    def alone(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return list(parameters)


_RIVALS: dict[str, type[Downpour]] = {
    "the server applies every push twice": _Twice,
    "Adagrad's sums are forgotten": _Forgetful,
    "of the gradients between two pushes, the last alone is pushed": _Last,
    "what was pushed is pushed again with the next": _All,
    "what is pushed is of the push before": _Late,
    "each replica pushes the gradients of the next": _OfOthers,
    "what is fetched is the version before the one that is told": _Before,
    "what is fetched is not taken": _NotTaken,
    "replicas do not step by themselves": _Idle,
}


def _losing(whose: int) -> type[Downpour]:
    class Losing(Downpour):
        def pushed(self, told: Told, replica: int, step: int) -> Tensors:
            return {} if replica == whose else super().pushed(told, replica, step)

    return Losing


def _rated(factor: float) -> type[Downpour]:
    class Rated(Downpour):
        def server(self, start: Tensors) -> Server:
            return Server(start, factor * self.spec.rate)

    return Rated


def _swapped(version: int) -> type[Downpour]:
    """With the next."""

    class Swapped(Downpour):
        def order(self, told: Told) -> dict[int, Push]:
            right = super().order(told)
            return {**right, version: right[version + 1], version + 1: right[version]}

    return Swapped


def _rivals(told: Told) -> Iterator[tuple[str, type[Downpour]]]:
    yield from _RIVALS.items()
    for replica in range(len(told.versions)):
        yield f"the pushes of replica {replica} are lost", _losing(replica)
    for factor in (2.0, 0.5, 10.0, 0.1):
        yield f"the server's rate is {factor:g} times the right one", _rated(factor)
    pushes = told.pushes()
    for version in pushes:
        if version + 1 in pushes and pushes[version][0] != pushes[version + 1][0]:
            one, other = (f"replica {r}'s of step {s}" for r, s in (pushes[version + 1], pushes[version]))
            yield f"{one} was applied before {other}, though the order that is told is another", _swapped(version)


def explain_server(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation:
    """`wrong`: parameters by replica, the worst first."""
    told, spec = told_of(failed.traces), failed.case.workload.algorithm.server
    assert spec is not None
    cannot = [what for (_, step), what in impossible(spec, told) if step == failed.step]
    if cannot:
        return Fault.ALGORITHM, f"an order that cannot be: {cannot[0]}"
    replays = Replays(failed, wrong, _of(Downpour, told))

    def accounts() -> Iterator[Account]:
        for how, rival in _rivals(told):
            yield replays.explained(_of(rival, told)), (Fault.ALGORITHM, how)
        yield from replays.of_rules()

    unknown = "the gradients are right, and no known server under any known update rule makes this of the order told"
    return replays.longest(accounts()) or (Fault.UNEXPLAINED, unknown)


def _of(kind: type[Downpour], told: Told) -> Transitions:
    def built(workload: Workload, rules: Sequence[UpdateRule]) -> Algorithm:
        algorithm = kind(workload, rules)
        algorithm.follow(told)
        return algorithm

    return built
