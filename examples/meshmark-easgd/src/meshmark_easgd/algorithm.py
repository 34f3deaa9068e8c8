"""Elastic averaging SGD (Zhang, Choromanska and LeCun, arXiv:1412.6651), with synchronous meetings.

Replica i of n steps alone, x_i <- step(x_i, g_i). After every H-th step an elastic force draws it to the center c, and
c to all replicas: d_i = x_i - c, x_i <- x_i - a d_i, c <- c + a sum_i d_i. At first c is where all replicas start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, Tensors, UpdateRule, averaged, combined
from meshmark.algorithms.local_sgd import Periodic
from meshmark.algorithms.local_sgd.transition import LocalSGDTransition
from meshmark.errors import InputError

if TYPE_CHECKING:
    from meshmark.spec.case import Case
    from meshmark.spec.workload import Workload


@dataclass(frozen=True, kw_only=True)
class EASGD(Periodic):
    """Elastic averaging SGD. Raises `InputError` for a moving rate outside of (0, 1)."""

    kind: ClassVar[str] = "easgd"
    moving_rate: float = 0.25
    """The paper's alpha: the part of the way to the center that a replica moves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.moving_rate < 1:
            raise InputError(f"easgd: moving_rate is {self.moving_rate}, expected above 0 and below 1")

    def vectors_kept(self, case: Case, rank: int) -> int:
        """The center."""
        return 1

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> EASGDTransition:
        return EASGDTransition(workload, rules, self.moving_rate)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        yield FaultHypothesis("parameters are averaged, and there is no center", LocalSGDTransition)
        yield FaultHypothesis("the center stays where it was", partial(CenterStays, moving_rate=self.moving_rate))
        yield FaultHypothesis("the center is the mean of replicas", partial(CenterIsMean, moving_rate=self.moving_rate))


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


# --- Common faults. The one that explains a wrong run is named.


class CenterStays(EASGDTransition):
    def next_center(self, center: Tensors, after: Sequence[Tensors]) -> Tensors:
        return center


class CenterIsMean(EASGDTransition):
    def next_center(self, center: Tensors, after: Sequence[Tensors]) -> Tensors:
        return averaged(after)[0]
