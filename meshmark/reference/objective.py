"""The loss and the optimizer: the parts of a step that do not depend on the framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from meshmark.reference.chunked_loss import chunked_cross_entropy
from meshmark.reference.data import IGNORED, Batch
from meshmark.reference.optimizers import reference_optimizer
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.tuning import Tuning
from meshmark.spec.workload import Loss

_PLAIN = Tuning()


def loss_share(outputs: Tensor, batch: Batch, loss: Loss, *, chunked: bool = False) -> Tensor:
    """The share that `batch` has in the loss of its global batch: the sum over its targets, by weight, over the weight
    of all targets of the *global* batch. The shares of all parts add up to the global mean whatever the number of
    targets in each. Scalar, in float32 or, for float64 outputs, float64. `chunked`: without a copy of the outputs."""
    if chunked:
        weights = batch.weights if loss is Loss.WEIGHTED_CROSS_ENTROPY else torch.ones_like(batch.weights)
        return chunked_cross_entropy(outputs, batch.targets, weights) / batch.total_weight
    if loss is Loss.OWN:
        return _wide(outputs) / batch.total_weight
    if loss is Loss.CROSS_ENTROPY:
        return cross_entropy(outputs, batch.targets) / batch.total_weight
    return weighted_cross_entropy(outputs, batch.targets, batch.weights) / batch.total_weight


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over all targets but those that are `IGNORED`; `outputs` has one dim more, the classes."""
    flat = _wide(outputs).flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def weighted_cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The same, each target times its weight."""
    wide = _wide(outputs)
    each = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return (each * weights.flatten().to(wide.dtype)).sum()


def _wide(outputs: Tensor) -> Tensor:
    return outputs if outputs.dtype is torch.float64 else outputs.float()


def build_optimizer(
    spec: OptimizerSpec, parameters: Iterable[tuple[str, nn.Parameter]], tuning: Tuning = _PLAIN
) -> torch.optim.Optimizer:
    """PyTorch's optimizer for `spec` over named parameters, of which frozen ones are left out; fused where that is a
    case's `tuning`."""
    return reference_optimizer(spec).build(parameters, **({"fused": True} if tuning.fused_optimizer else {}))


class Schedule(Protocol):
    """A scheduler of learning rates: PyTorch's, or a framework's around it."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...

    def get_last_lr(self) -> Sequence[float | Tensor]: ...


def build_schedule(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> Schedule | None:
    """PyTorch's scheduler for `spec`, to be stepped once an optimizer step; None when the rate is constant."""
    return LambdaLR(optimizer, spec.rate_factor) if spec.warmup_steps else None
