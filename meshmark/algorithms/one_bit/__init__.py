"""1-bit Adam, 1-bit LAMB and 0/1 Adam: momenta travel as signs, by a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.algorithms.compressed import Served
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.errors import InputError
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from meshmark.algorithms.compressed.transition import CompressedTransition
    from meshmark.algorithms.contract import FaultHypothesis, ObservedRun


@dataclass(frozen=True, kw_only=True)
class SignMomenta(Served):
    """Base of algorithms that send momenta as signs. Raises `InputError` without a warm-up."""

    takes: ClassVar[frozenset[CompressorKind]] = frozenset({CompressorKind.SIGN})
    warms_up: ClassVar[bool] = True
    warmup_steps: int = 0
    """Steps in which the variance moves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps < 1:
            raise InputError(
                f"algorithm: warmup_steps is {self.warmup_steps}, expected at least 1 with {self.kind}: its variance "
                "is the warm-up's"
            )

    @classmethod
    def presets(cls) -> Iterator[Self]:
        yield cls(compressor=Compressor(kind=CompressorKind.SIGN), warmup_steps=2)

    @property
    def id(self) -> str:
        return f"{super().id}w{self.warmup_steps}"

    def compresses(self, step: int) -> bool:
        return step >= self.warmup_steps

    def reduces_gradients(self, step: int) -> bool:
        return step < self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(SignMomenta):
    """After a warm-up by Adam its variance is frozen, and momenta are compressed twice (arXiv:2102.02888)."""

    kind: ClassVar[str] = "one-bit-adam"

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        if _is_unclipped(optimizer, OptimizerKind.ADAMW):
            return None
        return "is Adam, and no gradient of all replicas is known to clip; take kind adamw without clipping"

    def local_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        return replace(optimizer, kind=OptimizerKind.SGD)

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.one_bit.transition import OneBitAdamTransition

        return OneBitAdamTransition

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.compressed.faults import compression_faults
        from meshmark.algorithms.one_bit.faults import OF_ONE_BIT_ADAM

        return compression_faults(self, run, OF_ONE_BIT_ADAM)


@dataclass(frozen=True, kw_only=True)
class OneBitLAMB(SignMomenta):
    """1-bit Adam's way for LAMB (arXiv:2104.06069).

    The rates of tensors start from the warm-up's, and go on by what compressed momenta tell of gradients.
    """

    kind: ClassVar[str] = "one-bit-lamb"
    vectors_between_steps: ClassVar[int] = 2

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        if _is_unclipped(optimizer, OptimizerKind.LAMB):
            return None
        return "is LAMB, and no gradient of all replicas is known to clip; take kind lamb without clipping"

    def local_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        # The decay is part of the update whose norm decides a tensor's rate.
        return replace(optimizer, kind=OptimizerKind.SGD, weight_decay=0.0)

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.one_bit.transition import OneBitLAMBTransition

        return OneBitLAMBTransition

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.compressed.faults import compression_faults
        from meshmark.algorithms.one_bit.faults import OF_ONE_BIT_LAMB

        return compression_faults(self, run, OF_ONE_BIT_LAMB)


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(SignMomenta):
    """Adam whose variance moves ever more seldom, and whose replicas step alone between meetings (arXiv:2202.06009).

    In the warm-up replicas meet after every step, later after every `period`-th; what they have stepped by is
    compressed where they meet. Raises `InputError` for a period below 1.
    """

    kind: ClassVar[str] = "zero-one-adam"
    vectors_between_steps: ClassVar[int] = 3
    period: int = 1
    """Steps from one meeting to the next, after the warm-up; the first step after it meets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise InputError(f"algorithm: period is {self.period}, expected at least 1")

    @classmethod
    def presets(cls) -> Iterator[Self]:
        yield cls(compressor=Compressor(kind=CompressorKind.SIGN), warmup_steps=2, period=2)

    @property
    def id(self) -> str:
        assert self.compressor is not None
        return f"{self.kind}{self.period}-{self.compressor.id}w{self.warmup_steps}"

    @property
    def replicas_agree(self) -> bool:
        return False

    def reduces_gradients(self, step: int) -> bool:
        return False

    @property
    def steps_per_meeting(self) -> int:
        return self.period

    def averages_after(self, step: int) -> bool:
        since = step - self.warmup_steps
        return since >= 0 and since % self.period == 0

    def compresses(self, step: int) -> bool:
        return step < self.warmup_steps or self.averages_after(step)

    def adapts(self, step: int) -> bool:
        """Return whether `step` updates the variance from whole gradients.

        It does so at the powers of two within the warm-up (section 5).
        """
        counted = step + 1
        return step < self.warmup_steps and not counted & (counted - 1)

    def sends_gradients(self, step: int) -> bool:
        return self.adapts(step)

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        if _is_unclipped(optimizer, OptimizerKind.ADAMW) and not optimizer.weight_decay:
            return None
        return "is specified for Adam alone; take kind adamw without weight decay and clipping"

    def local_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        return replace(optimizer, kind=OptimizerKind.SGD)

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.one_bit.transition import ZeroOneAdamTransition

        return ZeroOneAdamTransition

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.compressed.faults import compression_faults
        from meshmark.algorithms.one_bit.faults import OF_ZERO_ONE_ADAM

        return compression_faults(self, run, OF_ZERO_ONE_ADAM)


def _is_unclipped(optimizer: OptimizerSpec, kind: OptimizerKind) -> bool:
    return optimizer.kind is kind and optimizer.clip_norm is None


ALGORITHMS: tuple[type[Algorithm], ...] = (OneBitAdam, OneBitLAMB, ZeroOneAdam)
