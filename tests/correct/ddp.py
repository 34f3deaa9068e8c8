"""DDP by other hands. Each engine computes the mathematics of `ddp` and declares what `ddp` declares. It differs in
what that declaration leaves open: the order of rows, their micro-batches, fused products, how attention is computed.

Shape suffixes: B rows, T tokens, C hidden, H heads, K heads of keys and values, D a head's width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext, skip_block
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.models.transformer.module import Attention, rotate
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype
from meshmark.theory.memory import ExtraMemory, model_states
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException, exceptions_for, step_traffic


class InOrder(DDPEngine):
    """Trains its rows in micro-batches that `split` chooses."""

    def split(self, part: Batch) -> list[Batch]:
        return list(part.micro_batches(self.case.layout.num_micro_batches))

    def backward(self, batch: Batch) -> Tensor:
        part = self.part(batch).to(self.context.device)
        skip_block(self.module, batch, self.case.workload)
        total = torch.zeros((), device=self.context.device)
        micro_batches = self.split(part)
        for i, micro in enumerate(micro_batches):
            with self.micro_batch(last=i == len(micro_batches) - 1):
                share = self.loss_share(self.forward(micro.inputs), micro)
                self.differentiate(share * self.case.layout.dp)
            total = total + share.detach()
        self.finish_gradients()
        return total


class ReversedMicroBatches(InOrder):
    def split(self, part: Batch) -> list[Batch]:
        return super().split(part)[::-1]


class ReversedRows(InOrder):
    """Within every micro-batch."""

    def split(self, part: Batch) -> list[Batch]:
        return [micro.take(torch.arange(len(micro) - 1, -1, -1)) for micro in super().split(part)]


class StridedRows(DDPEngine):
    """As `DistributedSampler` deals them out: every rank takes each dp-th row."""

    def part(self, batch: Batch) -> Batch:
        return batch.take(torch.arange(self.dp_rank, len(batch), self.case.layout.dp))


class TwiceTheMicroBatches(InOrder):
    """Memory is short: every micro-batch in two halves, where it has two rows."""

    def split(self, part: Batch) -> list[Batch]:
        count = self.case.layout.num_micro_batches
        return list(part.micro_batches(2 * count if len(part) >= 2 * count else count))


class HalfTheMicroBatches(InOrder):
    def split(self, part: Batch) -> list[Batch]:
        return list(part.micro_batches(max(self.case.layout.num_micro_batches // 2, 1)))


class FusedAttention(Attention):
    """Queries, keys and values are one product."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        layers = [self.q, self.k, self.v]
        weight = torch.cat([layer.weight for layer in layers])
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        product = F.linear(x_BTC, weight, None if self.q.bias is None else torch.cat(biases))
        heads = [
            part.reshape(B, T, -1, self.head_dim).transpose(1, 2)
            for part in product.split([layer.out_features for layer in layers], dim=-1)
        ]
        out: Tensor = self.out(self.attend(*heads).transpose(1, 2).reshape(B, T, -1))
        return out


class ByHand:
    """Scores, a softmax in float32, and the mean of values, each its own operation."""

    head_dim: int
    causal: bool
    rotary: bool

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self.rotary:
            q_BHTD, k_BKTD = rotate(q_BHTD), rotate(k_BKTD)
        groups = q_BHTD.shape[1] // k_BKTD.shape[1]
        k_BHTD, v_BHTD = (x.repeat_interleave(groups, dim=1) for x in (k_BKTD, v_BKTD))
        scores_BHTT = (q_BHTD @ k_BHTD.transpose(-2, -1)).float() / self.head_dim**0.5
        if self.causal:
            T = scores_BHTT.shape[-1]
            future = torch.ones(T, T, dtype=torch.bool, device=scores_BHTT.device).triu(1)
            scores_BHTT = scores_BHTT.masked_fill(future, float("-inf"))
        return scores_BHTT.softmax(-1).to(v_BHTD.dtype) @ v_BHTD


class AttentionByHand(ByHand, Attention): ...


class FusedAttentionByHand(ByHand, FusedAttention): ...


class OtherHands(DDP):
    """`ddp` with one of these engines, or another attention."""

    attention: ClassVar[type[Attention] | None] = None

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        module = super().wrap(case, context)
        for part in module.modules():
            if self.attention and isinstance(part, Attention):
                part.__class__ = self.attention
        return module


class ReversedMicroBatchesDDP(OtherHands):
    engine = ReversedMicroBatches


class ReversedRowsDDP(OtherHands):
    engine = ReversedRows


class StridedRowsDDP(OtherHands):
    engine = StridedRows


def of_other_micro_batches(cls: type[Adapter], case: Case, rank: int, count: int) -> tuple[ExtraMemory, ...]:
    """Return how much more or less is held if a step has `count` micro-batches, not those of the layout."""
    layout = replace(case.layout, num_micro_batches=count)
    plan = model_states(case, rank, cls.recipe(case))
    other = model_states(replace(case, layout=layout), rank, cls.recipe(case))
    if plan is None or other is None or None in (plan.activations, plan.peak, other.activations, other.peak):
        return ()
    reason = f"{count} micro-batches a step, not {case.layout.num_micro_batches}"
    activations, peak = other.activations - plan.activations, other.peak - plan.peak
    return (
        ExtraMemory(category="activations", num_bytes=activations, reason=reason),
        ExtraMemory(category="peak", num_bytes=peak - activations, reason=reason),
    )


class TwiceTheMicroBatchesDDP(OtherHands):
    engine = TwiceTheMicroBatches

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return of_other_micro_batches(cls, case, rank, 2 * case.layout.num_micro_batches)


class HalfTheMicroBatchesDDP(OtherHands):
    engine = HalfTheMicroBatches

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return of_other_micro_batches(cls, case, rank, max(case.layout.num_micro_batches // 2, 1))


class OtherOperations(OtherHands):
    """Computes by other operations than the reference's, which save other activations."""

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return replace(super().recipe(case), activations_known=False)


class FusedProductsDDP(OtherOperations):
    attention = FusedAttention


class AttentionByHandDDP(OtherOperations):
    attention = AttentionByHand


class EverythingElseDDP(OtherOperations):
    """All of it at once."""

    engine = StridedRows
    attention = FusedAttentionByHand


class ChunkedLoss(DDPEngine):
    """The head's loss, a quarter of the rows' tokens at a time."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        classes, targets, weights = outputs.flatten(0, -2), batch.targets.flatten(), batch.weights.flatten()
        shares = [
            (F.cross_entropy(part.float(), target, reduction="none") * weight).sum()
            for part, target, weight in zip(classes.chunk(4), targets.chunk(4), weights.chunk(4), strict=True)
        ]
        return torch.stack(shares).sum() / batch.total_weight


class ChunkedLossDDP(OtherOperations):
    engine = ChunkedLoss


def _reduce_wide(group: dist.ProcessGroup, bucket: Any) -> Future[Tensor]:  # noqa: ANN401
    """Sums gradients over ranks in float64."""
    wide = bucket.buffer().double().div_(group.size())
    future = dist.all_reduce(wide, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class WideReductionDDP(OtherHands):
    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        def wide(flow: Flow) -> Flow:
            return replace(flow, num_bytes=flow.num_bytes // case.precision.reduction.itemsize * Dtype.FP64.itemsize)

        flows = step_traffic(case, rank)
        return exceptions_for(flows, Purpose.GRADIENTS, "gradients are added up in float64", wide)

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        module = super().wrap(case, context)
        module.register_comm_hook(dist.group.WORLD, lambda group, bucket: _reduce_wide(group, bucket))
        return module
