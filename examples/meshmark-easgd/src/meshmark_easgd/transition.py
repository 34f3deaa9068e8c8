"""The exact transition of elastic averaging SGD, and ways to get it wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from meshmark.algorithms.contract import FaultHypothesis, Tensors, UpdateRule, averaged, combined
from meshmark.algorithms.local_sgd.transition import LocalSGDTransition
from meshmark.spec.workload import Workload


class EASGDTransition(LocalSGDTransition):
    center: Tensors | None = None
    """c."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule], moving_rate: float) -> None:
        super().__init__(workload, rules)
        self.moving_rate = moving_rate

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        self.center = self.center or parameters[0]
        return super().transition(parameters, gradients)

    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        center, rate = self.center, self.moving_rate
        assert center is not None
        self.center = self.next_center(center, after)
        return [combined((1 - rate, x), (rate, center)) for x in after]

    def next_center(self, center: Tensors, after: Sequence[Tensors]) -> Tensors:
        pull = len(after) * self.moving_rate
        return combined((1 - pull, center), (pull, averaged(after)[0]))


class CenterStays(EASGDTransition):
    def next_center(self, center: Tensors, after: Sequence[Tensors]) -> Tensors:
        return center


class CenterIsMean(EASGDTransition):
    def next_center(self, center: Tensors, after: Sequence[Tensors]) -> Tensors:
        return averaged(after)[0]


def easgd_faults(moving_rate: float) -> Iterator[FaultHypothesis]:
    yield FaultHypothesis("parameters are averaged, and there is no center", LocalSGDTransition)
    yield FaultHypothesis("the center stays where it was", partial(CenterStays, moving_rate=moving_rate))
    yield FaultHypothesis("the center is the mean of replicas", partial(CenterIsMean, moving_rate=moving_rate))
