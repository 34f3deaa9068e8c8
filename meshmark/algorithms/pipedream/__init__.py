"""Pipelines that do not wait: PipeDream, PipeDream-2BW and PipeMare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.errors import InputError
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from meshmark.algorithms.contract import (
        FaultHypothesis,
        GradientHypothesis,
        GradientRule,
        ObservedRun,
        Transition,
        UpdateRule,
    )
    from meshmark.algorithms.pipedream.schedule import ByMicroBatch, ByStep
    from meshmark.spec.case import Case


@dataclass(frozen=True, kw_only=True)
class Stale(Algorithm):
    """Base of pipelines that compute gradients of older weights."""

    stale_weights: ClassVar[bool] = True

    @classmethod
    def presets(cls) -> Iterator[Self]:
        yield cls()


@dataclass(frozen=True, kw_only=True)
class UpdatesByMicroBatch(Stale):
    """Pipelines in which every micro-batch makes an update of its own."""

    updates_by_micro_batch: ClassVar[bool] = True

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        plain = optimizer.kind is OptimizerKind.SGD and not optimizer.weight_decay and optimizer.clip_norm is None
        if not plain or optimizer.momentum:
            return "is defined on plain SGD; take kind sgd without momentum, weight decay and clipping"
        if optimizer.warmup_steps:
            return "makes several updates a step, all of one rate; take an optimizer without a schedule"
        return None


@dataclass(frozen=True, kw_only=True)
class PipeDream(UpdatesByMicroBatch):
    """Micro-batches update weights one by one, each by the weights that it found (arXiv:1806.03377)."""

    kind: ClassVar[str] = "pipedream"

    def gradient_rule(self, workload: Workload, layout: Layout) -> ByMicroBatch:
        from meshmark.algorithms.pipedream.schedule import ByMicroBatch, in_flight

        return ByMicroBatch(workload=workload, layout=layout, versions=in_flight(layout.pp))

    def gradient_hypotheses(self, workload: Workload, layout: Layout) -> Iterator[GradientHypothesis]:
        from meshmark.algorithms.pipedream.faults import micro_batch_faults

        return micro_batch_faults(self.gradient_rule(workload, layout), "pipedream-vertical")


@dataclass(frozen=True, kw_only=True)
class PipeDreamVertical(UpdatesByMicroBatch):
    """PipeDream with vertical synchronisation: at all stages the version that the first stage had."""

    kind: ClassVar[str] = "pipedream-vertical"

    def gradient_rule(self, workload: Workload, layout: Layout) -> ByMicroBatch:
        from meshmark.algorithms.pipedream.schedule import ByMicroBatch, of_first_stage

        return ByMicroBatch(workload=workload, layout=layout, versions=of_first_stage(layout.pp))

    def gradient_hypotheses(self, workload: Workload, layout: Layout) -> Iterator[GradientHypothesis]:
        from meshmark.algorithms.pipedream.faults import micro_batch_faults

        return micro_batch_faults(self.gradient_rule(workload, layout), "pipedream")


@dataclass(frozen=True, kw_only=True)
class PipeDream2BW(Stale):
    """A pipeline whose every step is of the weights before the last one (arXiv:2006.09503)."""

    kind: ClassVar[str] = "pipedream-2bw"

    def vectors_kept(self, case: Case, rank: int) -> int:
        """The weights of the step before."""
        return 1

    def gradient_rule(self, workload: Workload, layout: Layout) -> ByStep:
        from meshmark.algorithms.pipedream.schedule import ByStep, of_step_before

        return ByStep(workload=workload, layout=layout, versions=of_step_before(layout.pp))

    def gradient_hypotheses(self, workload: Workload, layout: Layout) -> Iterator[GradientHypothesis]:
        from meshmark.algorithms.pipedream.faults import step_faults

        return step_faults(self.gradient_rule(workload, layout))

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.pipedream.faults import update_faults

        return update_faults()


@dataclass(frozen=True, kw_only=True)
class PipeMare(UpdatesByMicroBatch):
    """A pipeline that stashes no weights (arXiv:1910.05124).

    Backward passes estimate the weights of the forward passes, and early stages start with smaller rates. Raises
    `InputError` for options out of range.
    """

    kind: ClassVar[str] = "pipemare"
    annealing_steps: int = 4
    """The paper's K: steps until all stages have one learning rate."""
    discrepancy_decay: float = 0.135
    """The paper's D: what is left of a velocity after as many updates as a stage is late."""

    def __post_init__(self) -> None:
        if self.annealing_steps < 1 or not 0 < self.discrepancy_decay < 1:
            raise InputError(
                f"algorithm: annealing_steps {self.annealing_steps} and discrepancy_decay {self.discrepancy_decay}; "
                "expected at least 1, and a share between 0 and 1"
            )

    def vectors_kept(self, case: Case, rank: int) -> int:
        """The velocity of the weights."""
        return 1

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> Transition:
        from meshmark.algorithms.pipedream.pipemare import PipeMareTransition

        return PipeMareTransition(rules[0], workload, num_stages)

    def gradient_rule(self, workload: Workload, layout: Layout) -> GradientRule:
        from meshmark.algorithms.pipedream.pipemare import PipeMareRule

        return PipeMareRule(workload, layout)

    def gradient_hypotheses(self, workload: Workload, layout: Layout) -> Iterator[GradientHypothesis]:
        from meshmark.algorithms.pipedream.faults import pipemare_faults

        return pipemare_faults(workload, layout)


ALGORITHMS: tuple[type[Algorithm], ...] = (PipeDream, PipeDream2BW, PipeDreamVertical, PipeMare)
