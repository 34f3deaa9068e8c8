"""What every framework minimises, and with which optimizer: the parts of a training step that are not the framework's.

Shape suffixes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from meshmark.reference.data import IGNORED, Batch
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec


def loss_share(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """The share that `batch` has in the loss of its global batch: the sum of its unmasked tokens' cross-entropies over
    the *global* number of unmasked tokens. The shares of all parts add up to the global mean whatever the number of
    tokens in each. Scalar, in float32 or, for float64 logits, float64."""
    wide = logits_BTV if logits_BTV.dtype is torch.float64 else logits_BTV.float()
    total = F.cross_entropy(wide.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / batch.num_tokens


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
