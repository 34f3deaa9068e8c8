"""How Downpour SGD is got wrong: the order of pushes, what is pushed, and how the server steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, Tensors, Transition, UpdateRule
from meshmark.algorithms.downpour.transition import DownpourTransition, Push, Server, gathered, pushes_of
from meshmark.spec.workload import Workload


class _Twice(DownpourTransition):
    def server(self, start: Tensors) -> Server:
        class Twice(Server):
            def step(self, pushed: Tensors) -> None:
                super().step(pushed)
                super().step(pushed)

        return Twice(start, self.spec.rate)


class _Forgetful(DownpourTransition):
    def server(self, start: Tensors) -> Server:
        class Forgetful(Server):
            def summed(self, before: NDArray[np.floating], u: NDArray[np.floating]) -> NDArray[np.floating]:
                square: NDArray[np.floating] = u * u
                return square

        return Forgetful(start, self.spec.rate)


class _Last(DownpourTransition):
    def pushed(self, run: ObservedRun, replica: int, step: int) -> Tensors:
        return run.gradients[replica][step]


class _All(DownpourTransition):
    def pushed(self, run: ObservedRun, replica: int, step: int) -> Tensors:
        return gathered(run.gradients[replica][: step + 1])


class _Late(DownpourTransition):
    def pushed(self, run: ObservedRun, replica: int, step: int) -> Tensors:
        return super().pushed(run, replica, step - self.spec.push_every) if step else {}


class _OfOthers(DownpourTransition):
    def pushed(self, run: ObservedRun, replica: int, step: int) -> Tensors:
        return super().pushed(run, (replica + 1) % len(run.server_versions), step)


class _Before(DownpourTransition):
    def wanted(self, run: ObservedRun) -> set[int]:
        return {max(version - 1, 0) for version in super().wanted(run)}

    def version(self, reported: int) -> int:
        return max(reported - 1, 0)


class _NotTaken(DownpourTransition):
    def followed(self, alone: Sequence[Tensors]) -> list[Tensors]:
        return list(alone)


class _Idle(DownpourTransition):
    def alone(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return list(parameters)


_WRONG: dict[str, type[DownpourTransition]] = {
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


def _losing(whose: int) -> type[DownpourTransition]:
    class Losing(DownpourTransition):
        def pushed(self, run: ObservedRun, replica: int, step: int) -> Tensors:
            return {} if replica == whose else super().pushed(run, replica, step)

    return Losing


def _rated(factor: float) -> type[DownpourTransition]:
    class Rated(DownpourTransition):
        def server(self, start: Tensors) -> Server:
            return Server(start, factor * self.spec.rate)

    return Rated


def _swapped(version: int) -> type[DownpourTransition]:
    """With the next."""

    class Swapped(DownpourTransition):
        def order(self, run: ObservedRun) -> dict[int, Push]:
            right = super().order(run)
            return {**right, version: right[version + 1], version + 1: right[version]}

    return Swapped


def _wrong_transitions(run: ObservedRun) -> Iterator[tuple[str, type[DownpourTransition]]]:
    yield from _WRONG.items()
    for replica in range(len(run.server_versions)):
        yield f"the pushes of replica {replica} are lost", _losing(replica)
    for factor in (2.0, 0.5, 10.0, 0.1):
        yield f"the server's rate is {factor:g} times the right one", _rated(factor)
    pushes = pushes_of(run)
    for version in pushes:
        if version + 1 in pushes and pushes[version][0] != pushes[version + 1][0]:
            one, other = (f"replica {r}'s of step {s}" for r, s in (pushes[version + 1], pushes[version]))
            yield f"{one} was applied before {other}, though the order that is told is another", _swapped(version)


def downpour_faults(run: ObservedRun) -> Iterator[FaultHypothesis]:
    for how, wrong in _wrong_transitions(run):
        yield FaultHypothesis(how, _following(wrong, run))


def _following(
    kind: type[DownpourTransition], run: ObservedRun
) -> Callable[[Workload, Sequence[UpdateRule]], Transition]:
    def built(workload: Workload, rules: Sequence[UpdateRule]) -> Transition:
        transition = kind(workload, rules)
        transition.follow(run)
        return transition

    return built
