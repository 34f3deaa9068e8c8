"""Roundings to 16 bits that a correct run may have and no adapter declares: biases added apart, heads in chunks.

A linear layer that is written as `x @ weight.T + bias` rounds the product before it adds the bias. Where a bias is
smaller than half of the product's last place, it is lost.

Logits of a whole batch are the largest tensor of many a model. A loss that is computed in chunks never holds them. The
gradient of the head's weight is then a sum of products that are each rounded to 16 bits, and all other gradients are
those of the twin.

Both can be computed, so that no noise needs to be allowed for: a run's gradients are those of one of them, or they are
wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmark.algorithms.contract import Tensors
from meshmark.judge.trace import Trace
from meshmark.judge.twin import Twin, TwinStep, add_biases_apart
from meshmark.models.module import Model
from meshmark.reference.data import Batch

SAME = 1e-6
"""Distance, relative to a gradient, up to which it is the twin's but for the order of sums."""
_NUMBERS = (2, 3, 4, 6, 8, 16)
"""Numbers of chunks that are tried."""


def with_other_roundings(
    twin: Twin, found: TwinStep, trace: Trace, parameters: Tensors, batch: Batch, step: int
) -> TwinStep:
    """Return the twin's step, or that of another rounding if its gradients are the run's.

    Chunks are looked for only if the head's gradients are the only ones that are not the twin's.
    """
    own = trace.gradients[step]
    off = {name for name in found.gradients if _distance(own, found.gradients, name) > SAME}
    if not off or not twin.case.precision.is_mixed:
        return found

    def rewritten(rewrite: Callable[[Model], None]) -> TwinStep:
        return dataclasses.replace(twin, rewrite=rewrite).step_of(trace, parameters, batch, step)

    if off <= _of_head(twin):
        for rewrite in _rewrites(batch):
            other = rewritten(rewrite)
            if all(_distance(own, other.gradients, name) <= SAME for name in off):
                chunked = {name: other.gradients[name] for name in off}
                return dataclasses.replace(found, gradients={**found.gradients, **chunked})
    for layer in (_BiasAdded, _NarrowBiasAdded) if _may_add_biases(twin, found) else ():
        apart = rewritten(functools.partial(add_biases_apart, layer=layer))
        if all(_distance(own, apart.gradients, name) <= SAME for name in found.gradients):
            return apart
    return found


def _may_add_biases(twin: Twin, found: TwinStep) -> bool:
    """Return whether linear layers may add their biases otherwise than the twin's: not if it is declared already.

    A compiled twin would be compiled again in every step, which takes seconds.
    """
    declared = twin.case.layout.zero_stage in twin.arithmetic.adds_biases_apart_at
    return not (declared or twin.case.tuning.compile) and any(
        f"{layer}.bias" in found.gradients for layer in twin.linear_layers
    )


class _BiasAdded(nn.Linear):
    """Under autocast, the sum of the narrow product and the wide bias is wide."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class _NarrowBiasAdded(nn.Linear):
    """The sum in place is as narrow as the product."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.bias is not None:
            y += self.bias
        return y


def _distance(own: Tensors, exact: Tensors, name: str) -> float:
    if name not in own:
        return float("inf")
    size = float(np.linalg.norm(exact[name])) or 1.0
    return float(np.linalg.norm(np.asarray(own[name], dtype=np.float64) - exact[name])) / size


def _of_head(twin: Twin) -> set[str]:
    """Return the names of the parameters of the model's last linear layer."""
    head = next(reversed(twin.linear_layers), "")
    return {f"{head}.weight", f"{head}.bias"} if head else set()


def _rewrites(batch: Batch) -> Iterator[_ChunkHead]:
    lengths = (1, batch.inputs.shape[1]) if batch.inputs.dim() > 1 else (1,)
    for of_rows, number, alone in itertools.product((False, True), _NUMBERS, (True, False)):
        if of_rows or number <= lengths[-1]:
            yield _ChunkHead(number, dim=0 if of_rows else -2, alone=alone)


@dataclasses.dataclass(frozen=True)
class _ChunkHead:
    """Replaces a model's last linear layer by one that takes positions or rows in chunks."""

    number: int
    dim: int
    alone: bool
    """Whether each chunk has a cast of the weight of its own, so that their gradients are added in float32."""

    def __call__(self, model: Model) -> None:
        module = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        module.__class__ = _Chunked
        module.number, module.dim, module.alone = self.number, self.dim, self.alone  # type: ignore[assignment]


class _Chunked(nn.Linear):
    number: int
    dim: int
    alone: bool

    def forward(self, x: Tensor) -> Tensor:
        parts, device = x.chunk(self.number, dim=self.dim), x.device.type
        if not (self.alone and torch.is_autocast_enabled(device)):
            return torch.cat([F.linear(part, self.weight, self.bias) for part in parts], dim=self.dim)
        kind = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            found = [
                F.linear(part.to(kind), self.weight.to(kind), None if self.bias is None else self.bias.to(kind))
                for part in parts
            ]
        return torch.cat(found, dim=self.dim)
