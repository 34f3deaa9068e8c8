"""Gradients that are wrong without an error: scaled, not reduced, of other data, old, or rounded. Mixins."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_reduce

from meshmark.reference.data import IGNORED, Batch, make_batch
from meshmark.reference.objective import loss_share
from meshmark.reference.own_model import weight_of
from meshmark.spec.own_model import OwnModelConfig
from tests.broken.engine import ONE_NORM, Broken


class OverMicroBatches(Broken):
    """The mean over micro-batches of what was summed (pytorch#144352)."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss / self.case.layout.num_micro_batches)


class ScalesGrads(Broken):
    """GPipe's own switch for it."""

    def backward(self, batch: Batch) -> Tensor:
        self.schedule.scale_grads = True
        return super().backward(batch)


class SummedOverRanks(Broken):
    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss * self.case.layout.dp)


class AveragedTwice(Broken):
    def after_backward(self) -> None:
        for _, grad in self.grads():
            grad.div_(self.context.world_size)


class SlightScale(Broken):
    """One norm's gradient off by a hundred-thousandth: far below what any loss shows."""

    by = 1e-5

    def after_backward(self) -> None:
        for name, grad in self.grads():
            if name == ONE_NORM:
                grad.mul_(1 + self.by)


class SlightBlock(Broken):
    """Every gradient of one block off by three millionths."""

    def after_backward(self) -> None:
        for name, grad in self.grads():
            if name.startswith("blocks.1."):
                grad.mul_(1 + 3e-6)


class NotUnscaled(Broken):
    """The loss scale is never divided out."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss * 2.0**10)


class Ascends(Broken):
    def after_backward(self) -> None:
        for _, grad in self.grads():
            grad.neg_()


class ReducedTwice(Broken):
    """One norm is in two buckets (NeMo#9335)."""

    def after_backward(self) -> None:
        for name, grad in self.grads():
            if name == ONE_NORM:
                all_reduce(grad)


class TiedReducedTwice(Broken):
    def after_backward(self) -> None:
        if self.tied_group is not None:
            all_reduce(self._tied_weight().grad, group=self.tied_group)


class TiedNotReduced(Broken):
    def backward(self, batch: Batch) -> Tensor:
        self.tied_group = None
        return super().backward(batch)


class NoReduction(Broken):
    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.module.no_sync():
            yield


class LastNotReduced(Broken):
    """Reduced while the last micro-batch is still to come (DeepSpeed#7371)."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.module.no_sync() if last else contextlib.nullcontext():
            yield


class OneNotReduced(Broken):
    """A norm that reduction does not know of (Megatron-LM#1446)."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        part = self.batch.shard(self.dp_rank, self.case.layout.dp)
        model = self.module.module
        own = torch.autograd.grad(
            loss_share(model(part.inputs), part, self.case.workload.loss), model.get_parameter(ONE_NORM)
        )[0]
        model.get_parameter(ONE_NORM).grad.copy_(own * self.case.layout.dp)


class WrongGroup(Broken):
    """Reduced over pairs of neighbours, in a world of four."""

    def prepare(self) -> None:
        self.pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.module.no_sync():
            yield

    def after_backward(self) -> None:
        for _, grad in self.grads():
            all_reduce(grad, group=self.pairs[self.context.rank // 2])
            grad.div_(2)


class InputNotReduced(Broken):
    """Tensor parallelism that does not sum the gradient of what its ranks share."""

    def prepare(self) -> None:
        for module in self.model.modules():
            if type(module).__name__ in ("Attention", "FeedForward"):
                module._forward_pre_hooks.clear()


class MeanOfRanks(Broken):
    """Each rank divides by its own number of tokens (transformers#34373)."""

    def backward(self, batch: Batch) -> Tensor:
        dp = self.case.layout.dp
        own = float(batch.shard(self.dp_rank, dp).weights.sum())
        return super().backward(dataclasses.replace(batch, total_weight=own * dp))


class MeanOfRanksOfOwn(Broken):
    """The same of a user's own model, whose own loss says what rows weigh."""

    def backward(self, batch: Batch) -> Tensor:
        model, dp = self.case.workload.model, self.case.layout.dp
        assert isinstance(model, OwnModelConfig)
        own = weight_of(model.target, batch.shard(self.dp_rank, dp).inputs)
        return super().backward(dataclasses.replace(batch, total_weight=own * dp))


class MeanOfMicroBatches(Broken):
    """Each micro-batch divides by its own number of tokens (transformers#34191)."""

    def loss_share(self, logits_BTV: Tensor, batch: Batch) -> Tensor:
        layout, own = self.case.layout, float(batch.weights.sum())
        mean = dataclasses.replace(batch, total_weight=own * layout.num_micro_batches * layout.dp)
        return super().loss_share(logits_BTV, mean)


class MeanOfPipeline(Broken):
    def prepare(self) -> None:
        self.schedule._loss_fn = self._loss

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        self.total_weight = int((targets_BT != IGNORED).sum()) * self.case.layout.num_micro_batches
        return super()._loss(logits_BTV, targets_BT)


class MovingAverage(Broken):
    """Accumulation that halves what it has before it adds (torchtitan#1733)."""

    def differentiate(self, loss: Tensor) -> None:
        for _, grad in self.grads():
            grad.div_(2)
        super().differentiate(loss / 2)


class DropsLast(Broken):
    """The last micro-batch's gradient comes to nothing; its loss is told all the same."""

    def differentiate(self, loss: Tensor) -> None:
        self.count = getattr(self, "count", 0) + 1
        super().differentiate(loss * (self.count % self.case.layout.num_micro_batches != 0))


class DropsFirst(Broken):
    """Gradients are cleared between the first micro-batch and the second."""

    def differentiate(self, loss: Tensor) -> None:
        self.count = getattr(self, "count", -1) + 1
        super().differentiate(loss)
        if self.count % self.case.layout.num_micro_batches == 0:
            for _, grad in self.grads():
                grad.zero_()


class SameRows(Broken):
    """Every rank trains on the first rank's sequences."""

    @property
    def dp_rank(self) -> int:
        return 0


class DropsRank(Broken):
    """The second rank's gradients come to nothing."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss * (self.context.rank != 1))


class LosesRareToken(Broken):
    """The first rank's gradient of one token's embedding is lost: of the rarest that it has seen."""

    def backward(self, batch: Batch) -> Tensor:
        own = batch.shard(self.dp_rank, self.case.layout.dp)  # type: ignore[attr-defined]
        tokens, counts = own.inputs.unique(return_counts=True)
        rarest = int(tokens[counts.argmin()])

        def lose(grad: Tensor) -> Tensor:
            lost = grad.clone()
            lost[rarest] = 0
            return lost

        weight = dict(self.named())["embedding.tokens.weight"]
        handle = weight.register_hook(lose) if self.context.rank == 0 else None
        loss = super().backward(batch)
        if handle:
            handle.remove()
        return loss


class NextBatch(Broken):
    def backward(self, batch: Batch) -> Tensor:
        return super().backward(make_batch(self.case.workload, self.steps + 1))


class RankLags(Broken):
    """The second rank's loader is a batch behind."""

    def backward(self, batch: Batch) -> Tensor:
        step = max(self.steps - (self.context.rank == 1), 0)
        own = make_batch(self.case.workload, step)
        return super().backward(dataclasses.replace(own, total_weight=batch.total_weight))


class NoMask(Broken):
    def backward(self, batch: Batch) -> Tensor:
        return super().backward(make_batch(dataclasses.replace(self.case.workload, masked=False), self.steps))


class CountsMasked(Broken):
    """Masked positions have no loss, but are divided by."""

    def backward(self, batch: Batch) -> Tensor:
        return super().backward(dataclasses.replace(batch, total_weight=batch.targets.numel()))


class StaleGradients(Broken):
    """The buffer of the last step is reduced."""

    def after_backward(self) -> None:
        fresh = {name: grad.clone() for name, grad in self.grads()}
        for name, grad in self.grads():
            grad.copy_(getattr(self, "buffer", fresh)[name])
        self.buffer = fresh


class NotCleared(Broken):
    """zero_grad forgotten."""

    def prepare(self) -> None:
        self.optimizer.zero_grad = lambda set_to_none=True: None


class StaleWeights(Broken):
    """Forward and backward at the parameters of a step ago, as in a pipeline that does not flush."""

    def backward(self, batch: Batch) -> Tensor:
        now = [p.detach().clone() for p in self.locals()]
        self.put(getattr(self, "before", now))
        loss = super().backward(batch)
        self.put(now)
        self.before = now
        return loss


class Bf16Accumulation(Broken):
    """DeepSpeed#1800."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss)
        for _, grad in self.grads():
            grad.copy_(grad.bfloat16())


class CompressedReduction(Broken):
    """DDP's own hook that compresses gradients, to the 16 bits that it does on a CPU."""

    def prepare(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        module: Any = self.module
        module.register_comm_hook(None, fp16_compress_hook)


class Bf16Forward(Broken):
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits: Tensor = self.module(inputs)
        return logits


class Frozen(Broken):
    """One norm gets no gradient."""

    def after_backward(self) -> None:
        for name, grad in self.grads():
            if name == ONE_NORM:
                grad.zero_()


class Dropout(Broken):
    """Active, though none was asked for."""

    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1


class OtherEpsilon(Broken):
    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-3


class TellsOwnLoss(Broken):
    """Each rank's mean, summed."""

    def backward(self, batch: Batch) -> Tensor:
        return super().backward(batch) * self.context.world_size
