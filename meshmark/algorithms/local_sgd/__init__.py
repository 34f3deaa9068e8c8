"""Local SGD, DiLoCo and FedAvg: replicas step alone, and meet after every H-th step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.errors import InputError
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.workload import Workload
from meshmark.theory.traffic import METERED_STEP, Flow, Purpose, parameter_sizes, reductions

if TYPE_CHECKING:
    from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, Transition, UpdateRule
    from meshmark.spec.case import Case


@dataclass(frozen=True, kw_only=True)
class Periodic(Algorithm):
    """Algorithms whose replicas step alone and meet every `period` steps. Raises `InputError` for a period below 1."""

    replicas_differ: ClassVar[bool] = True
    period: int = 1
    """Steps from one meeting to the next. The first step meets, as in PyTorch's `PeriodicModelAverager`."""

    def __post_init__(self) -> None:
        if self.period < 1:
            raise InputError(f"algorithm: period is {self.period}, expected at least 1")

    @classmethod
    def presets(cls) -> Iterator[Self]:
        yield cls(period=2)

    @property
    def id(self) -> str:
        return f"{self.kind}{self.period}"

    @property
    def steps_per_meeting(self) -> int:
        return self.period

    def averages_after(self, step: int) -> bool:
        return step >= 0 and step % self.period == 0

    def steps_alone(self, step: int) -> bool:
        return not self.averages_after(step)

    def traffic_repeats(self, case: Case, rank: int, step: int) -> bool:
        return self.averages_after(step) == self.averages_after(METERED_STEP) and (
            self.reduces_gradients(step) == self.reduces_gradients(METERED_STEP)
        )

    def traffic(self, case: Case, rank: int) -> list[Flow]:
        """Nothing but gradients in the warm-up, and parameters when they are averaged (arXiv:1808.07217)."""
        count, tensors = parameter_sizes(case, rank)
        flows = []
        if self.reduces_gradients(METERED_STEP):
            num_bytes = count * case.precision.reduction.itemsize
            flows += reductions(case, rank, Purpose.GRADIENTS, num_bytes, (1, tensors))
        if self.averages_after(METERED_STEP):
            num_bytes = count * case.precision.master.itemsize
            flows += reductions(case, rank, Purpose.WEIGHTS, num_bytes, (1, tensors))
        return flows


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Periodic):
    """Local SGD (arXiv:1805.09767): replicas step alone, and now and then their parameters are averaged.

    After a synchronous warm-up it is post-local SGD (arXiv:1808.07217). Raises `InputError` for a negative warm-up.
    """

    kind: ClassVar[str] = "local-sgd"
    warms_up: ClassVar[bool] = True
    warmup_steps: int = 0
    """Synchronous steps, before the first other one; that one meets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps < 0:
            raise InputError(f"algorithm: warmup_steps is {self.warmup_steps}, expected 0 or more")

    @property
    def id(self) -> str:
        return super().id + (f"w{self.warmup_steps}" if self.warmup_steps else "")

    def averages_after(self, step: int) -> bool:
        return super().averages_after(step - self.warmup_steps)

    def reduces_gradients(self, step: int) -> bool:
        return step < self.warmup_steps

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> Transition:
        from meshmark.algorithms.local_sgd.transition import LocalSGDTransition

        return LocalSGDTransition(workload, rules)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.local_sgd.faults import local_sgd_faults

        return local_sgd_faults(self, run)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Periodic):
    """Local SGD whose averages are taken for a gradient, on which Nesterov's momentum steps (arXiv:2311.08105).

    Raises `InputError` for a rate that is not positive, or a momentum outside of [0, 1).
    """

    kind: ClassVar[str] = "diloco"
    outer_rate: float = 0.7
    """Learning rate on averages; the default is the paper's."""
    outer_momentum: float = 0.9
    """Momentum on averages; the default is the paper's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_rate <= 0 or not 0 <= self.outer_momentum < 1:
            raise InputError(
                f"algorithm: outer_rate {self.outer_rate} and outer_momentum {self.outer_momentum}; expected a rate "
                "above 0, and a momentum of at least 0 and less than 1"
            )

    def vectors_kept(self, case: Case, rank: int) -> int:
        return 2

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> Transition:
        from meshmark.algorithms.local_sgd.transition import DiLoCoTransition

        return DiLoCoTransition(workload, rules)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.local_sgd.faults import diloco_faults

        return diloco_faults()


@dataclass(frozen=True, kw_only=True)
class FedAvg(Periodic):
    """Local SGD of replicas with unequal numbers of rows, whose averages weigh by them (arXiv:1602.05629)."""

    kind: ClassVar[str] = "fed-avg"

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> Transition:
        from meshmark.algorithms.local_sgd.transition import FedAvgTransition

        return FedAvgTransition(workload, rules)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.local_sgd.faults import fed_avg_faults

        return fed_avg_faults()


ALGORITHMS: tuple[type[Algorithm], ...] = (LocalSGD, DiLoCo, FedAvg)
