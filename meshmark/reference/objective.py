"""What every framework minimises, and with which optimizer: the parts of a training step that are not the framework's.

Shape suffixes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from meshmark.reference.data import IGNORED, Batch
from meshmark.reference.optimizers import reference_optimizer
from meshmark.spec.optimizer import OptimizerSpec


def loss_share(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """The share that `batch` has in the loss of its global batch: the sum of its unmasked tokens' cross-entropies over
    the *global* number of unmasked tokens. The shares of all parts add up to the global mean whatever the number of
    tokens in each. Scalar, in float32 or, for float64 logits, float64."""
    wide = logits_BTV if logits_BTV.dtype is torch.float64 else logits_BTV.float()
    total = F.cross_entropy(wide.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / batch.num_tokens


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """PyTorch's optimizer for `spec` over named parameters, of which frozen ones are left out."""
    return reference_optimizer(spec).build(parameters)


def build_schedule(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> LambdaLR | None:
    """PyTorch's scheduler for `spec`, to be stepped once an optimizer step; None when the rate is constant."""
    return LambdaLR(optimizer, spec.rate_factor) if spec.warmup_steps else None
