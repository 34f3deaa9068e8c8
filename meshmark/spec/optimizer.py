"""Which optimizer a workload trains with, and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import InputError


class OptimizerKind(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer and its schedule."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled for AdamW, L2 for SGD."""
    clip_norm: float | None = 1.0
    """Largest global L2 norm of the gradients; None leaves them alone."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows linearly; 0 starts with all of it."""
    decay_matrices_only: bool = False
    """Norms and biases form a group of their own, without weight decay."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise InputError(f"optimizer: warmup_steps is {self.warmup_steps}, expected 0 or more")

    def rate_factor(self, step: int) -> float:
        """Of the learning rate at `step`, counted from 0: (step + 1) / warmup_steps, and 1 once that is reached."""
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0

    def decays(self, name: str) -> bool:
        """Whether weight decay applies to the parameter with this canonical name."""
        return not self.decay_matrices_only or not (name.endswith("bias") or "norm." in name)

    @property
    def states_per_parameter(self) -> int:
        """Tensors of a parameter's shape that the optimizer keeps."""
        return 2 if self.kind is OptimizerKind.ADAMW else 0
