"""Which optimizer a workload trains with, its schedule, and what it keeps of every parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from meshmark.errors import InputError
from meshmark.spec.precision import Dtype


class OptimizerKind(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"
    """With momentum where it is asked for, Nesterov's too."""
    ADAFACTOR = "adafactor"
    """Second moments of a matrix are kept as a row and a column (arXiv:1804.04235)."""
    MUON = "muon"
    """The update of a block's matrix is its momentum made orthogonal (arXiv:2502.16982); AdamW's for all others."""
    LARS = "lars"
    """SGD with a rate for every tensor, by its norm over its gradient's (arXiv:1708.03888)."""
    LAMB = "lamb"
    """Adam with a rate for every tensor, by its norm over its update's (arXiv:1904.00962)."""


LAYER_WISE = frozenset({OptimizerKind.LARS, OptimizerKind.LAMB})
MATRIX_WISE = frozenset({OptimizerKind.ADAFACTOR, OptimizerKind.MUON}) | LAYER_WISE
"""An element's update depends on others of its tensor: a shard cannot be updated alone."""
_WITH_MOMENTUM = frozenset({OptimizerKind.SGD, OptimizerKind.MUON, OptimizerKind.LARS})
_LIKE_SGD = frozenset({OptimizerKind.SGD, OptimizerKind.LARS})


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor that an optimizer keeps of one parameter."""

    name: str
    """PyTorch's."""
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer and its schedule. Raises `InputError` for options that contradict each other."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: float = 1e-3
    """Of Muon's matrices too, whose updates are scaled to be as large as AdamW's."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's and LAMB's decay rates."""
    eps: float = 1e-8
    """AdamW's, and the smallest root of a second moment for Adafactor."""
    weight_decay: float = 0.1
    """L2 for SGD and LARS, decoupled for the others."""
    clip_norm: float | None = 1.0
    """Largest global L2 norm of the gradients; None leaves them alone."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows linearly; 0 starts with all of it."""
    decay_matrices_only: bool = False
    """Norms and biases form a group of their own, without weight decay."""
    no_decay: tuple[str, ...] = ()
    """Shell patterns of the names of parameters that form a group of their own, without weight decay."""
    momentum: float = 0.0
    """SGD's, Muon's and LARS's."""
    nesterov: bool = False
    """The update looks ahead by one step of the momentum."""
    beta2_decay: float = -0.8
    """Adafactor's: at step t, counted from 1, its second moments keep 1 - t ** beta2_decay of what they were."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise InputError(f"optimizer: warmup_steps is {self.warmup_steps}, expected 0 or more")
        if not 0 <= self.momentum < 1:
            raise InputError(f"optimizer: momentum is {self.momentum}, expected at least 0 and less than 1")
        if self.momentum and self.kind not in _WITH_MOMENTUM:
            raise InputError(f"optimizer: {self.kind} has no momentum, got {self.momentum}; sgd, muon and lars have")
        if self.nesterov and not self.momentum:
            raise InputError("optimizer: nesterov looks ahead by the momentum, and momentum is 0")
        if self.nesterov and self.kind is OptimizerKind.LARS:
            raise InputError("optimizer: lars is defined without nesterov; take sgd, or leave it out")
        if self.no_decay and self.decay_matrices_only:
            raise InputError("optimizer: no_decay and decay_matrices_only both say what does not decay; leave one out")
        if self.beta2_decay > 0:
            raise InputError(f"optimizer: beta2_decay is {self.beta2_decay}, expected 0 or less")

    def rate_factor(self, step: int) -> float:
        """Of the learning rate at `step`, counted from 0: (step + 1) / warmup_steps, and 1 once that is reached."""
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0

    def decays(self, name: str) -> bool:
        """Whether weight decay applies to the parameter with this canonical name."""
        if self.no_decay:
            return not any(fnmatchcase(name, pattern) for pattern in self.no_decay)
        return not self.decay_matrices_only or not (name.endswith("bias") or "norm." in name)

    @property
    def groups_decay(self) -> bool:
        """Whether some parameters form a group without weight decay."""
        return self.decay_matrices_only or bool(self.no_decay)

    @property
    def is_matrix_wise(self) -> bool:
        return self.kind in MATRIX_WISE

    def orthogonalizes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether Muon's own rule applies to the parameter with this canonical name: the matrices of blocks."""
        return self.kind is OptimizerKind.MUON and len(shape) == 2 and name.startswith("blocks.")

    def states(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> tuple[StateTensor, ...]:
        """What is kept of a parameter, from its first update on, with moments in `dtype`; as PyTorch does."""
        step = StateTensor(name="step", shape=(), dtype=Dtype.FP32)
        if self.kind in _LIKE_SGD and not self.momentum:
            return ()
        if self.kind in _LIKE_SGD or self.orthogonalizes(name, shape):
            return (StateTensor(name="momentum_buffer", shape=shape, dtype=dtype),)
        if self.kind is not OptimizerKind.ADAFACTOR:
            return (step, *(StateTensor(name=moment, shape=shape, dtype=dtype) for moment in ("exp_avg", "exp_avg_sq")))
        if len(shape) < 2:
            return (step, StateTensor(name="variance", shape=shape, dtype=dtype))
        *others, rows, columns = shape
        return (
            step,
            StateTensor(name="row_var", shape=(*others, rows, 1), dtype=dtype),
            StateTensor(name="col_var", shape=(*others, 1, columns), dtype=dtype),
        )

    @property
    def states_per_parameter(self) -> int:
        """Tensors of a parameter's shape that the optimizer keeps of each; for one that is not matrix-wise."""
        assert not self.is_matrix_wise
        return sum(bool(state.shape) for state in self.states("", (1,), Dtype.FP32))
