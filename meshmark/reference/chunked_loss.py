"""Cross-entropy a few rows at a time: nothing of the size of the outputs is kept but they themselves and, in the
backward pass, their gradient.

Shape suffixes: N rows, V classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshmark.reference.data import IGNORED

ROWS = 256
"""At once; of 50,257 classes 51 MB in float32."""


def chunked_cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Each target's cross-entropy times its weight, summed, in at least float32; `outputs` has one dim more, the
    classes."""
    loss: Tensor = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        outputs.flatten(0, -2), targets.flatten(), weights.flatten()
    )
    return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs_NV: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(outputs_NV, targets_N, weights_N)
        total = torch.zeros((), dtype=_wide(outputs_NV), device=outputs_NV.device)
        for rows in _chunks(len(outputs_NV)):
            wide = outputs_NV[rows].to(total.dtype)
            each = F.cross_entropy(wide, targets_N[rows], ignore_index=IGNORED, reduction="none")
            total += (each * weights_N[rows].to(total.dtype)).sum()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Softmax less one at the target, times what the row counts."""
        outputs_NV, targets_N, weights_N = ctx.saved_tensors
        found_NV = torch.empty_like(outputs_NV)
        for rows in _chunks(len(outputs_NV)):
            targets = targets_N[rows]
            share = torch.softmax(outputs_NV[rows].to(gradient.dtype), -1)
            share[torch.arange(len(targets), device=targets.device), targets.clamp(min=0)] -= 1
            counts = weights_N[rows].to(gradient.dtype) * (targets != IGNORED) * gradient
            found_NV[rows] = share.mul_(counts[:, None])  # rounded once
        return found_NV, None, None


def _chunks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, num_rows, ROWS))


def _wide(outputs: Tensor) -> torch.dtype:
    return torch.float64 if outputs.dtype is torch.float64 else torch.float32
