"""By which algorithm replicas train together: what one step makes of the states of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import InputError


class AlgorithmKind(StrEnum):
    SYNCHRONOUS = "synchronous"
    """Every step is made of the whole global batch's gradient: replicas are the same, bit for bit."""
    LOCAL_SGD = "local-sgd"
    """Each replica steps on its own rows' gradient, and now and then parameters are averaged (arXiv:1805.09767); after
    a synchronous warm-up, post-local SGD (arXiv:1808.07217)."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """The algorithm, and how often its replicas meet. Raises `InputError` for numbers that mean nothing."""

    kind: AlgorithmKind = AlgorithmKind.SYNCHRONOUS
    period: int = 1
    """Local SGD: steps from one averaging to the next. The first step after the warm-up averages, as PyTorch's
    `PeriodicModelAverager` does."""
    warmup_steps: int = 0
    """Local SGD: steps that are synchronous, before the first local one."""

    def __post_init__(self) -> None:
        if self.period < 1:
            raise InputError(f"algorithm: period is {self.period}, expected at least 1")
        if self.warmup_steps < 0:
            raise InputError(f"algorithm: warmup_steps is {self.warmup_steps}, expected 0 or more")
        if self.kind is AlgorithmKind.SYNCHRONOUS and (self.period, self.warmup_steps) != (1, 0):
            raise InputError(
                f"algorithm: period {self.period} and warmup_steps {self.warmup_steps} mean nothing in synchronous "
                "training; leave them out, or use local_sgd"
            )

    @property
    def id(self) -> str:
        """`local-sgd2`, with three steps of warm-up `local-sgd2w3`; nothing for synchronous training."""
        if self.kind is AlgorithmKind.SYNCHRONOUS:
            return ""
        return f"{self.kind}{self.period}" + (f"w{self.warmup_steps}" if self.warmup_steps else "")

    @property
    def replicas_differ(self) -> bool:
        """Whether data-parallel replicas may hold other parameters than one another, by design."""
        return self.kind is not AlgorithmKind.SYNCHRONOUS

    def reduces_gradients(self, step: int) -> bool:
        """Whether `step` is made of the whole global batch's gradient; steps are counted from 0."""
        return not self.replicas_differ or step < self.warmup_steps

    def averages_after(self, step: int) -> bool:
        """Whether the replicas' parameters are averaged after the update of `step`."""
        since = step - self.warmup_steps
        return self.replicas_differ and since >= 0 and since % self.period == 0


def local_sgd(period: int, warmup_steps: int = 0) -> AlgorithmSpec:
    """Local SGD: replicas step alone, and are averaged every `period` steps once `warmup_steps` are over."""
    return AlgorithmSpec(kind=AlgorithmKind.LOCAL_SGD, period=period, warmup_steps=warmup_steps)
