"""What every framework minimises, and with which optimizer: the parts of a step that are not the framework's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from meshmark.reference.data import IGNORED, Batch
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import Loss


def loss_share(outputs: Tensor, batch: Batch, loss: Loss) -> Tensor:
    """The share that `batch` has in the loss of its global batch: the sum over its targets, by weight, over the weight
    of all targets of the *global* batch. The shares of all parts add up to the global mean whatever the number of
    targets in each. Scalar, in float32 or, for float64 outputs, float64."""
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


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """PyTorch's optimizer for `spec` over named parameters, of which frozen ones are left out."""
    cls, arguments = optimizer_arguments(spec)
    return cls(parameter_groups(spec, parameters), **arguments)


def parameter_groups(spec: OptimizerSpec, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """What PyTorch's optimizers take: one group, or a second one without weight decay where `spec` asks for it."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for name, p in trained if spec.decays(name)]}]
    if spec.decay_matrices_only:
        groups.append({"params": [p for name, p in trained if not spec.decays(name)], "weight_decay": 0.0})
    return groups


def optimizer_arguments(spec: OptimizerSpec) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and keyword arguments, for frameworks that construct the optimizer themselves."""
    if spec.kind is OptimizerKind.SGD:
        return torch.optim.SGD, {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    return torch.optim.AdamW, {
        "lr": spec.learning_rate,
        "betas": spec.betas,
        "eps": spec.eps,
        "weight_decay": spec.weight_decay,
    }


def build_schedule(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> LambdaLR | None:
    """PyTorch's scheduler for `spec`, to be stepped once an optimizer step; None when the rate is constant."""
    return LambdaLR(optimizer, spec.rate_factor) if spec.warmup_steps else None
