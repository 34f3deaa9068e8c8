"""Defects of one rank, one block, one tensor, one row or one element, which no global cause explains. Mixins."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_gather, all_reduce, broadcast
from torch.distributed.tensor import DTensor

from meshmark.adapter.engine import AUTOCAST
from meshmark.reference.data import IGNORED, Batch
from meshmark.reference.objective import loss_share
from tests.broken.engine import Broken, copy
from tests.broken.updates import Option

ONE_BIAS = "blocks.1.feed_forward.down.bias"


class _KnowsOwnPart(Broken):
    """Computes this rank's part of the gradients once more, without any reduction."""

    def own_part(self) -> dict[str, Tensor]:
        model: nn.Module = self.module.module  # type: ignore[attr-defined]
        part = self.batch.shard(self.dp_rank, self.case.layout.dp)  # type: ignore[attr-defined]
        low = AUTOCAST.get(self.case.precision.compute)
        with torch.autocast(self.context.device.type, dtype=low, enabled=low is not None):
            loss = loss_share(model(part.inputs), part, self.case.workload.loss)
        names, parameters = zip(*model.named_parameters(), strict=True)
        with torch.enable_grad():
            return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    def finish_gradients(self) -> None:
        super().finish_gradients()  # type: ignore[misc]
        with torch.enable_grad():
            part = self.own_part()
        with torch.no_grad():
            self.change(part)

    def change(self, part: dict[str, Tensor]) -> None:
        """Change the reduced gradients; `part` has this rank's own."""
        raise NotImplementedError


class ElementKept(_KnowsOwnPart):
    """The last element of a bucket is not reduced (a bucket that is one element too short)."""

    def change(self, part: dict[str, Tensor]) -> None:
        for name, grad in self.grads():
            if name == "head.norm.bias":
                grad.view(-1)[-1] = part[name].view(-1)[-1]


class TailKept(_KnowsOwnPart):
    """The last quarter of a weight is not reduced."""

    def change(self, part: dict[str, Tensor]) -> None:
        for name, grad in self.grads():
            if name == "blocks.1.feed_forward.up.weight":
                last = grad.numel() // 4
                grad.view(-1)[-last:] = part[name].view(-1)[-last:]


class BiasByMax(_KnowsOwnPart):
    """The gradients of a bias are reduced by the maximum."""

    def change(self, part: dict[str, Tensor]) -> None:
        for name, grad in self.grads():
            if name == ONE_BIAS:
                grad.copy_(part[name])
                all_reduce(grad, ReduceOp.MAX)


class OneRankHalved(_KnowsOwnPart):
    """The last rank's part of one block is halved before it is reduced."""

    def change(self, part: dict[str, Tensor]) -> None:
        for name, grad in self.grads():
            if name.startswith("blocks.1."):
                lost = part[name] / 2 * (self.context.rank == self.context.world_size - 1)
                all_reduce(lost)
                grad.sub_(lost)


class OneBlockLost(_KnowsOwnPart):
    """The first rank's part of one block comes to nothing."""

    def change(self, part: dict[str, Tensor]) -> None:
        for name, grad in self.grads():
            if name.startswith("blocks.0."):
                lost = part[name] * (self.context.rank == 0)
                all_reduce(lost)
                grad.sub_(lost)


class StaleTail(Broken):
    """The last eighth of every gradient's buffer is that of the step before."""

    def after_backward(self) -> None:
        fresh = {name: grad.clone() for name, grad in self.grads()}
        for name, grad in self.grads():
            last = max(grad.numel() // 8, 1)
            grad.view(-1)[-last:] = getattr(self, "buffer", fresh)[name].view(-1)[-last:]
        self.buffer = fresh


class OtherActivationOnLastRank(Broken):
    """The last rank computes GELU by its exact form, where the model has the tanh approximation."""

    def prepare(self) -> None:
        if self.context.rank != self.context.world_size - 1:
            return
        for module in self.modules():
            if type(module).__name__ == "FeedForward":
                other: Any = module
                module.forward = lambda x, other=other: other.down(F.gelu(other.up(x)))  # type: ignore[method-assign]


class MaskEarlyOnLastRank(Broken):
    """On the last rank the mask begins and ends one token early."""

    def backward(self, batch: Batch) -> Tensor:
        if self.context.rank == self.context.world_size - 1:
            masked = (batch.targets == IGNORED).roll(-1, 1)
            whole = self.case.workload
            from meshmark.reference.data import make_batch

            targets = make_batch(dataclasses.replace(whole, masked=False), self.steps).targets
            batch = dataclasses.replace(
                batch, targets=targets.masked_fill(masked, IGNORED), weights=(~masked).to(batch.weights.dtype)
            )
        return super().backward(batch)


class BlockStaleOnLastRank(Broken):
    """The last rank computes with one block's weights of the step before."""

    def backward(self, batch: Batch) -> Tensor:
        block = [p for name, p in self.named() if name.startswith("blocks.1.")]
        now = [p.detach().clone() for p in block]
        with torch.no_grad():
            if self.context.rank == self.context.world_size - 1:
                for parameter, old in zip(block, getattr(self, "before", now), strict=True):
                    parameter.copy_(old)
        loss = super().backward(batch)
        with torch.no_grad():
            for parameter, value in zip(block, now, strict=True):
                parameter.copy_(value)
        self.before = now
        return loss


class ClipsByLastNorm(Broken):
    """Clips by the global norm of the step before."""

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = super().clip(float("inf"))  # type: ignore[misc]
        last = getattr(self, "last", norm)
        for _, grad in self.grads():
            grad.mul_((max_norm / last).clamp(max=1.0))
        self.last = norm.clone()
        return norm


class LazyEmbedding(Broken):
    """Rows of the embedding that no token of the batch used are not updated, as by a sparse optimizer."""

    def update(self) -> Tensor | None:
        weight = dict(self.named())["embedding.tokens.weight"]
        assert weight.grad is not None
        unused = ~weight.grad.any(dim=1)
        before = weight.detach().clone()
        norm: Tensor | None = super().update()
        with torch.no_grad():
            weight[unused] = before[unused]
        return norm


class ShardsSwapped(Broken):
    """After the second update, the ranks' shards of one weight are in each other's place."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        if self.steps == 2:
            weight = dict(self.named())["blocks.1.feed_forward.up.weight"]
            assert isinstance(weight, DTensor)
            mine = weight.to_local().detach()
            shards = [torch.empty_like(mine) for _ in range(self.context.world_size)]
            all_gather(shards, mine.clone())
            with torch.no_grad():
                mine.copy_(shards[self.context.world_size - 1 - self.context.rank])
        return norm


class RowsInOrderOfRanks(Broken):
    """After the second update, a whole weight is put together of the ranks' halves in the wrong order."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        if self.steps == 2:
            weight = dict(self.named())["blocks.0.attention.q.weight"].data
            weight.copy_(weight.roll(len(weight) // 2, 0))
            broadcast(weight, 0)
        return norm


class AmsGrad(Option):
    """The maximum of the second moments divides."""

    options = {"amsgrad": True}


class EpsInsideRoot(Broken):
    """Adam's eps is added to the second moment before its root is taken."""

    def update(self) -> Tensor | None:
        group = self.optimizer.param_groups[0]
        before = {n: p.detach().clone() for n, p in self.named()}
        norm: Tensor | None = super().update()
        (first, second), rate, eps = group["betas"], group["lr"], group["eps"]
        with torch.no_grad():
            for name, parameter in self.named():
                if not (state := self.optimizer.state.get(parameter)):
                    continue
                decay = next(
                    g["weight_decay"] for g in self.optimizer.param_groups if any(p is parameter for p in g["params"])
                )
                count = float(state["step"])
                mean = state["exp_avg"] / (1 - first**count)
                square = state["exp_avg_sq"] / (1 - second**count)
                parameter.copy_(before[name] * (1 - rate * decay) - rate * mean / (square + eps).sqrt())
        return norm


class SecondMomentUnclipped(Broken):
    """Adam's second moment is that of gradients before they are clipped."""

    def clip(self, max_norm: float) -> Tensor:
        whole = {p: p.grad.clone() for _, p in self.named() if p.grad is not None}
        norm: Tensor = super().clip(max_norm)  # type: ignore[misc]
        self.more = {p: own.square() - p.grad.square() for p, own in whole.items() if p.grad is not None}
        return norm

    def update(self) -> Tensor | None:
        before = {p: p.detach().clone() for _, p in self.named()}
        norm: Tensor | None = super().update()
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                (first, second), rate = group["betas"], group["lr"]
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    state["exp_avg_sq"].add_(self.more[parameter], alpha=1 - second)
                    count = float(state["step"])
                    root = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
                    kept = before[parameter] * (1 - rate * group["weight_decay"])
                    parameter.copy_(kept - rate * state["exp_avg"] / (1 - first**count) / root)
        return norm


class _LastRankAlone(Broken):
    @property
    def is_last(self) -> bool:
        return self.context.rank == self.context.world_size - 1

    def shard(self, name: str) -> Tensor:
        """Return what this rank holds of a parameter."""
        parameter = dict(self.named())[name].detach()
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def moment(self, name: str, moment: str) -> Tensor:
        found: Tensor = self.inner_optimizer().state[dict(self.named())[name]][moment]
        return found.to_local() if isinstance(found, DTensor) else found


class _StaleShards(_LastRankAlone):
    """The last rank's shards of some weights are of the step before while something runs."""

    prefix: str
    before: dict[str, Tensor]

    def own(self) -> dict[str, Tensor]:
        return {name: self.shard(name) for name, _ in self.named() if name.startswith(self.prefix)}

    def update(self) -> Tensor | None:
        self.before = {name: value.clone() for name, value in self.own().items()}
        return super().update()  # type: ignore[safe-super]

    @contextlib.contextmanager
    def stale(self) -> Iterator[None]:
        if not hasattr(self, "before") or not self.is_last:
            yield
            return
        now = {name: value.clone() for name, value in self.own().items()}
        copy(self.own().values(), self.before.values())
        yield
        copy(self.own().values(), now.values())


class ForwardOfStaleBlock(_StaleShards):
    """Only the forward pass gathers the last rank's shards of a block as they were a step ago."""

    prefix = "blocks.1."

    def forward(self, inputs: Tensor) -> Tensor:
        with self.stale():
            found: Tensor = super().forward(inputs)  # type: ignore[misc]
        return found


class BackwardOfStaleBlock(_StaleShards):
    """Only the backward pass gathers the last rank's shards of a block as they were a step ago."""

    prefix = "blocks.0."

    def differentiate(self, loss: Tensor) -> None:
        with self.stale():
            super().differentiate(loss)  # type: ignore[misc]


class ForwardInOrderOfRanks(_LastRankAlone):
    """On the last rank the forward pass has the halves of a gathered weight in the wrong order."""

    def prepare(self) -> None:
        if self.is_last:
            self.root().get_submodule("blocks.1.attention.v").register_forward_pre_hook(exchange_halves)


def exchange_halves(module: nn.Module, inputs: object) -> None:
    weight: Any = module.weight
    weight.data.copy_(weight.data.roll(len(weight) // 2, 0))


class PositionsOffOnLastRank(_LastRankAlone):
    """The last rank counts positions from one; the last two are alike."""

    def prepare(self) -> None:
        if self.is_last:
            positions = self.root().get_submodule("module.embedding.positions")
            positions.register_forward_pre_hook(lambda module, inputs: ((inputs[0] + 1).clamp(max=inputs[0].max()),))


class TargetsLateInLastRow(_LastRankAlone):
    """In the last row of the batch, each target is that of the position after."""

    def backward(self, batch: Batch) -> Tensor:
        targets, weights = batch.targets.clone(), batch.weights.clone()
        targets[-1], weights[-1] = targets[-1].roll(-1), weights[-1].roll(-1)
        return super().backward(dataclasses.replace(batch, targets=targets, weights=weights))  # type: ignore[safe-super]


class ReadsBufferElsewhere(Broken):
    """A flat buffer of gradients is filled at multiples of 64 elements, and read without the gaps."""

    def after_backward(self) -> None:
        grads = [grad for _, grad in self.grads()]
        filled = torch.cat([torch.nn.functional.pad(g.flatten(), (0, -g.numel() % 64)) for g in grads])
        sizes = [g.numel() for g in grads]
        for grad, own in zip(grads, filled[: sum(sizes)].split(sizes), strict=True):
            grad.copy_(own.view_as(grad))


class HeadRounded(Broken):
    """The head's gradient is rounded to bf16, as chunks of a loss would round it, but only once."""

    def after_backward(self) -> None:
        for name, grad in self.grads():
            if name == "head.output.weight":
                grad.copy_(grad.bfloat16())


class BlockOfAnother(Broken):
    """A staging buffer that is filled too early: one block has the gradients of the block before."""

    def after_backward(self) -> None:
        grads = dict(self.grads())
        for name, grad in grads.items():
            if name.startswith("blocks.1."):
                grad.copy_(grads[name.replace("blocks.1.", "blocks.0.")])


class GradientShardShifted(_LastRankAlone):
    """In the last rank's shard of a gradient, every row is that of the row before."""

    def after_backward(self) -> None:
        if self.is_last:
            grad = dict(self.grads())["blocks.0.feed_forward.down.weight"]
            grad.copy_(grad.roll(1, 0))


class ShardBeginsEarly(_LastRankAlone):
    """The last rank's shard of a gradient begins a row early: with the last row of the rank before."""

    def after_backward(self) -> None:
        shard = dict(self.grads())["blocks.1.feed_forward.up.weight"]
        row = shard[-1].clone()
        torch.distributed.broadcast(row, self.context.world_size - 2)
        if self.is_last:
            shard.copy_(torch.cat([row[None], shard[:-1]]))


class RowWithoutGradient(_LastRankAlone):
    """Two rows of a reduced gradient come to nothing."""

    def after_backward(self) -> None:
        dict(self.grads())["blocks.1.attention.out.weight"][3:5] = 0


class RowsScaled(_LastRankAlone):
    """Some rows of a reduced gradient are a constant too large."""

    def after_backward(self) -> None:
        dict(self.grads())["blocks.1.feed_forward.up.weight"][8:24].mul_(1.37)


class LastRankKeepsOwnBias(_KnowsOwnPart):
    """The last rank does not take over what was reduced of a bias."""

    def change(self, part: dict[str, Tensor]) -> None:
        if self.context.rank == self.context.world_size - 1:
            dict(self.grads())[ONE_BIAS].copy_(part[ONE_BIAS])


class ShardRounded(_LastRankAlone):
    """The last rank's shard of a weight is rounded to bf16 after every update."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()  # type: ignore[safe-super]
        if self.is_last:
            shard = self.shard("blocks.1.attention.k.weight")
            shard.copy_(shard.bfloat16())
        return norm


class _ChangesMomentOnce(_LastRankAlone):
    """Changes a moment of one weight after the first update."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()  # type: ignore[safe-super]
        if self.steps == 1:
            self.change()
        return norm

    def change(self) -> None:
        raise NotImplementedError


class HalfForgotten(_ChangesMomentOnce):
    """The second half of a first moment is lost."""

    def change(self) -> None:
        moment = self.moment("blocks.0.feed_forward.up.weight", "exp_avg")
        moment[len(moment) // 2 :] = 0


class MomentShifted(_ChangesMomentOnce):
    """Each row of a second moment is that of the row before."""

    def change(self) -> None:
        moment = self.moment("blocks.0.feed_forward.down.weight", "exp_avg_sq")
        moment.copy_(moment.roll(1, 0))


class MomentsOfAnother(_ChangesMomentOnce):
    """The moments of a weight are those of the next one of the same shape."""

    def change(self) -> None:
        names = "blocks.0.attention.k.weight", "blocks.0.attention.v.weight"
        for moment in ("exp_avg", "exp_avg_sq"):
            to, of = (self.moment(name, moment) for name in names)
            to.copy_(of)
