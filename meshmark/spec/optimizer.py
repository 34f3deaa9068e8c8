"""Optimizers: kind, options, schedule, and the state they keep for each parameter."""

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
    """SGD, with optional momentum and Nesterov momentum."""
    ADAFACTOR = "adafactor"
    """Second moments of a matrix are kept as a row and a column (arXiv:1804.04235)."""
    MUON = "muon"
    """Updates matrices of blocks by their orthogonalized momentum (arXiv:2502.16982), and all others by AdamW."""
    LARS = "lars"
    """SGD with a rate per tensor: its norm divided by its gradient's norm (arXiv:1708.03888)."""
    LAMB = "lamb"
    """Adam with a rate per tensor: its norm divided by its update's norm (arXiv:1904.00962)."""


LAYER_WISE = frozenset({OptimizerKind.LARS, OptimizerKind.LAMB})
MATRIX_WISE = frozenset({OptimizerKind.ADAFACTOR, OptimizerKind.MUON}) | LAYER_WISE
"""Optimizers whose update of an element depends on others of its tensor, so that a shard cannot be updated alone."""
_WITH_MOMENTUM = frozenset({OptimizerKind.SGD, OptimizerKind.MUON, OptimizerKind.LARS})
_LIKE_SGD = frozenset({OptimizerKind.SGD, OptimizerKind.LARS})


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor that an optimizer keeps for one parameter."""

    name: str
    """Name in PyTorch."""
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
    """Learning rate. Muon's matrices use it too; their updates are scaled to the size of AdamW's."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW and LAMB."""
    eps: float = 1e-8
    """Epsilon of AdamW. For Adafactor, the smallest root of a second moment."""
    weight_decay: float = 0.1
    """Weight decay: L2 for SGD and LARS, decoupled for the others."""
    clip_norm: float | None = 1.0
    """Largest global L2 norm of the gradients. None disables clipping."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows linearly. 0 disables warmup."""
    decay_matrices_only: bool = False
    """If True, norms and biases form a separate group without weight decay."""
    no_decay: tuple[str, ...] = ()
    """Shell patterns of the names of parameters that form a separate group without weight decay."""
    momentum: float = 0.0
    """Momentum of SGD, Muon and LARS."""
    nesterov: bool = False
    """If True, the update looks ahead by one step of the momentum."""
    beta2_decay: float = -0.8
    """Decay exponent of Adafactor.

    At step t, counted from 1, second moments keep 1 - t ** beta2_decay of their value.
    """

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
        """Return the factor on the learning rate at `step`, counted from 0.

        It is (step + 1) / warmup_steps, and 1 after the warmup.
        """
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0

    def decays(self, name: str) -> bool:
        """Return whether weight decay applies to the parameter with this canonical name."""
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
        """Return whether Muon's own rule applies to the parameter with this canonical name: only to matrices of
        blocks.
        """
        return self.kind is OptimizerKind.MUON and len(shape) == 2 and name.startswith("blocks.")

    def states(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> tuple[StateTensor, ...]:
        """Return the states that PyTorch keeps for a parameter after its first update, with moments in `dtype`."""
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
        """State tensors of a parameter's shape. Only for optimizers that are not matrix-wise."""
        assert not self.is_matrix_wise
        return sum(bool(state.shape) for state in self.states("", (1,), Dtype.FP32))
