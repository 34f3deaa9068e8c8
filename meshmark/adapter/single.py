"""Plain PyTorch in one process: the truth in float64. In a case's precision its noise gives the tolerance model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import AUTOCAST, DataParallelEngine, Engine, RankContext, initial_model, skip_block
from meshmark.models.module import with_values
from meshmark.models.transformer import Family
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case, Knob
from meshmark.spec.precision import Precision

Forward = Callable[[Tensor], Tensor]


class SingleEngine(DataParallelEngine):
    cast_weights = False
    """In mixed precision, cast the weights (and so the whole residual stream) as FSDP2 and DeepSpeed do, in place of
    autocast, which keeps norms and residuals in float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self._with_weights(lambda forward: forward(inputs))

    def _with_weights(self, compute: Callable[[Forward], Tensor]) -> Tensor:
        """Return what `compute` returns, given a forward pass by the weights that products read."""
        dtype = AUTOCAST.get(self.case.precision.compute)
        if not self.cast_weights or dtype is None:
            return compute(super().forward)
        weights = {name: parameter.to(dtype) for name, parameter in self.module.named_parameters()}
        return with_values(self.module, weights, lambda: compute(self.module))

    def backward_once(self, batch: Batch) -> Tensor:
        """Add the gradients of one micro-batch to the existing ones, and return its share of the loss."""
        micro = batch.to(self.context.device)
        skip_block(self.module, micro, self.case.workload)

        def compute(forward: Forward) -> Tensor:
            share = self.loss_share(forward(micro.inputs), micro)
            self.differentiate(share)
            return share.detach()

        return self._with_weights(compute)


def reduced_backward(engine: SingleEngine, batch: Batch, num_ranks: int) -> Tensor:
    """Run `engine.backward` on a whole batch, and reduce gradients in the case's precision as `num_ranks` ranks would.

    Each rank's part is rounded, and so is their sum. The reduction happens once per step, as in DDP. If weights are
    cast, it happens after every micro-batch, as in FSDP.
    """
    count, named = engine.case.layout.num_micro_batches, dict(engine.named_parameters())
    total, loss = dict[str, Tensor](), torch.zeros((), device=engine.context.device)
    sent: list[list[dict[str, Tensor]]] = []
    for rank in range(num_ranks):
        share, own = list(batch.shard(rank, num_ranks).micro_batches(count)), []
        for micro_batches in [[micro] for micro in share] if engine.cast_weights else [share]:
            loss = loss + torch.stack([engine.backward_once(micro) for micro in micro_batches]).sum()
            own.append({name: p.grad for name, p in named.items() if p.grad is not None})
            engine.module.zero_grad(set_to_none=True)
        sent.append(own)
    for gradients in zip(*sent, strict=True):
        for name in gradients[0]:
            wide = _sum_rounded([part[name] for part in gradients], engine.case.precision)
            total[name] = total[name] + wide if name in total else wide
    for name, gradient in total.items():
        named[name].grad = gradient
    engine.finish_gradients()
    return loss


def _sum_rounded(parts: list[Tensor], precision: Precision) -> Tensor:
    """Return the sum of all ranks' gradients, rounded to the dtype of the reduction.

    Each rank's gradient is multiplied by the number of ranks before rounding, and divided by it after.
    """
    low, num_ranks = getattr(torch, precision.reduction), len(parts)
    sent = [(part * num_ranks).to(low).div_(num_ranks) for part in parts]
    return functools.reduce(torch.add, sent).to(parts[0].dtype)


class Single(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        precisions=frozenset(Precision.PRESETS.values()),
        families=frozenset(Family),
        tunings=frozenset(Knob),
        unfreezes=True,
        lacks={Feature.RESHARD: "it runs on one rank alone"},
    )

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, context.device)
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters(), case.tuning)
        return SingleEngine(case, context, model, optimizer)
