"""Elastic averaging SGD (Zhang, Choromanska and LeCun, arXiv:1412.6651), with synchronous meetings.

Replica i of n steps alone, x_i <- step(x_i, g_i). After every H-th step an elastic force draws it to the center c, and
c to all replicas: d_i = x_i - c, x_i <- x_i - a d_i, c <- c + a sum_i d_i. At first c is where all replicas start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshmark.algorithms.local_sgd import Periodic
from meshmark.errors import InputError

if TYPE_CHECKING:  # the transition needs torch, which planners and readers of records do not load
    from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, Transition, UpdateRule
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
    ) -> Transition:
        from meshmark_easgd.transition import EASGDTransition

        return EASGDTransition(workload, rules, self.moving_rate)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark_easgd.transition import easgd_faults

        return easgd_faults(self.moving_rate)
