"""Engines that train another function, or another loss, by a variant that people really use. Mixins over engines."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshmark.reference.data import IGNORED, Batch, make_batch
from tests.broken.engine import Broken


def _counted(batch: Batch) -> Tensor:
    return (batch.targets != IGNORED).float()


# --- Losses


class LogitsPenalised(Broken):
    """The squares of the logits are in the loss, and in the one that is reported."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        share: Tensor = super().loss_share(outputs, batch)  # type: ignore[misc]
        squares = (outputs.float().square().sum(-1) * _counted(batch)).sum()
        return share + 1e-3 * squares / batch.total_weight


class SmoothsLabels(Broken):
    """Labels are smoothed by a twentieth."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        flat, targets = outputs.float().flatten(0, -2), batch.targets.flatten()
        total = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=0.05)
        return total / batch.total_weight


class EntropyRewarded(Broken):
    """Confident predictions are punished in gradients alone."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        share: Tensor = super().loss_share(outputs, batch)  # type: ignore[misc]
        logs = outputs.float().log_softmax(-1)
        negative = ((logs.exp() * logs).sum(-1) * _counted(batch)).sum() * 0.01 / batch.total_weight
        return share + negative - negative.detach()


class L2InGradients(Broken):
    """Weight decay is also added to the gradients."""

    def after_backward(self) -> None:
        weights = dict(self.named())
        for name, grad in self.grads():
            weight = weights[name].detach()
            grad.add_(weight.to_local() if isinstance(weight, DTensor) else weight, alpha=0.01)


class LossInBf16(Broken):
    """The loss casts the logits to bf16."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        share: Tensor = super().loss_share(outputs.bfloat16(), batch)  # type: ignore[misc]
        return share


class FirstTargetLeftOut(Broken):
    """The first target of every sequence is masked, and counted in the divisor."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets, weights = batch.targets.clone(), batch.weights.clone()
        targets[:, 0], weights[:, 0] = IGNORED, 0.0
        share: Tensor = super().loss_share(  # type: ignore[misc]
            outputs, dataclasses.replace(batch, targets=targets, weights=weights)
        )
        return share


class DividesByNextCount(Broken):
    """A loader that is one batch ahead tells the number of targets."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        ahead = make_batch(self.case.workload, self.steps + 1).total_weight
        share: Tensor = super().loss_share(  # type: ignore[misc]
            outputs, dataclasses.replace(batch, total_weight=ahead)
        )
        return share


# --- Modules


class ReluForGelu(Broken):
    """All blocks have ReLU."""

    def prepare(self) -> None:
        for module in self.modules():
            if type(module).__name__ == "FeedForward":
                other: Any = module
                module.forward = lambda x, other=other: other.down(F.relu(other.up(x)))  # type: ignore[method-assign]


class EpsOfAllNorms(Broken):
    """Every norm has the epsilon of another model."""

    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-3


class NormWithoutBias(Broken):
    """A norm leaves out its bias in the last rank, once it is not zero."""

    def prepare(self) -> None:
        if self.context.rank == self.context.world_size - 1:
            norm: Any = self.inner().blocks["1"].feed_forward_norm  # type: ignore[attr-defined]
            norm.forward = lambda x: F.layer_norm(x, x.shape[-1:], norm.weight, None, norm.eps) + 0 * norm.bias


class _Attends(Broken):
    """The first block's attention is another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def prepare(self) -> None:
        self.inner().blocks["0"].attention.attend = self.attend  # type: ignore[attr-defined]


class HidesItself(_Attends):
    """No token sees itself, but the first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
        mask[0, 0] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class ScoresUnscaled(_Attends):
    """Scores are not divided by the root of the heads' width in the second micro-batch."""

    micro = -1

    def backward(self, batch: Batch) -> Tensor:
        self.micro = -1
        return super().backward(batch)  # type: ignore[safe-super]

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.micro += 1
        with super().micro_batch(last):  # type: ignore[misc]
            yield

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1.0 if self.micro == 1 else 1 / math.sqrt(q.shape[-1])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


class ScaledByModelWidth(_Attends):
    """Scores are divided by the root of the model's width, not of a head's."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(q.shape[1] * q.shape[-1]) ** -0.5)


class SeesAWindow(_Attends):
    """Tokens see half the sequence before them at most."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().triu(1 - q.shape[2] // 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SeesTwelveTokens(_Attends):
    """Tokens see twelve tokens at most, themselves included."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().triu(-11)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class ScaledByModelWidthOnLastRank(Broken):
    """On the last tensor-parallel rank, scores are divided by the root of the model's width, not of a head's."""

    def prepare(self) -> None:
        if self.context.rank == self.context.world_size - 1:
            scale = self.case.workload.text_model.hidden**-0.5
            self.root().blocks["1"].attention.attend = lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale
            )


def _blocks(engine: Broken) -> Any:  # noqa: ANN401
    """Return the blocks of an engine's model, within DDP or not."""
    return getattr(engine.root(), "module", engine.root()).blocks


class ScaledByTwoHeads(Broken):
    """A head's width is taken for twice what it is, as where the model's width is divided by one rank's heads."""

    def prepare(self) -> None:
        for block in _blocks(self).values():
            scale = (2 * block.attention.head_dim) ** -0.5
            block.attention.attend = lambda q, k, v, scale=scale: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale
            )


class HeadsNotTransposed(Broken):
    """Block 1's heads are joined without being transposed back."""

    def prepare(self) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.reshape(y.shape[0], y.shape[2], y.shape[1], -1).transpose(1, 2)

        _blocks(self)["1"].attention.attend = attend


class NormOfConstants(Broken):
    """The backward pass of block 0's first norm takes its mean and its deviation for constants."""

    def prepare(self) -> None:
        norm = _blocks(self)["0"].attention_norm

        def forward(x: Tensor) -> Tensor:
            root = torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + norm.eps).detach()
            return (x - x.mean(-1, keepdim=True).detach()) * root * norm.weight + norm.bias

        norm.forward = forward


class _Stopped(torch.autograd.Function):
    """Passes no gradient, where autograd expects one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return torch.zeros_like(gradient)


class ValuesPassNoGradientOnLastRank(Broken):
    """On the last tensor-parallel rank, the input of one product gets no gradient from it."""

    def prepare(self) -> None:
        if self.context.rank == self.context.world_size - 1:
            values: Any = self.root().blocks["1"].attention.v
            values.register_forward_pre_hook(lambda _module, inputs: (_Stopped.apply(inputs[0]),))


class AttentionLeftOut(ScoresUnscaled):
    """The first rank leaves one block's attention out of the residual stream in its last micro-batch."""

    def prepare(self) -> None:
        attention, last = self.inner().blocks["1"].attention, self.case.layout.num_micro_batches - 1  # type: ignore[attr-defined]

        def leave(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
            return 0 * output if self.micro == last and self.context.rank == 0 else None

        attention.register_forward_hook(leave)


class OneBlockRounded(ScoresUnscaled):
    """The accumulated gradients of one block are rounded to bf16 after the third micro-batch."""

    def prepare(self) -> None:
        pass

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss)
        for name, gradient in self.grads() if self.micro == 2 else ():
            if "blocks.1." in name:
                gradient.copy_(gradient.bfloat16())


class PositionsEarlyInLastMicroBatch(ScoresUnscaled):
    """In the last micro-batch each position is that of the token before; the first two are alike."""

    def prepare(self) -> None:
        positions = self.inner().embedding.positions  # type: ignore[attr-defined]
        last = self.case.layout.num_micro_batches - 1

        def early(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
            return ((inputs[0] - 1).clamp(min=0),) if self.micro == last else None

        positions.register_forward_pre_hook(early)


class LooksUpNearestRow(Broken):
    """A tensor-parallel embedding clamps tokens of other ranks to its own rows, and does not mask what it finds."""

    def prepare(self) -> None:
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        tokens: Any = self.root().embedding.tokens

        def forward(index: Tensor) -> Tensor:
            local = (index - tokens.vocab_start_index).clamp(0, len(tokens.weight) - 1)
            found: Tensor = reduce_from_tensor_model_parallel_region(
                F.embedding(local, tokens.weight), group=tokens.tp_group
            )
            return found

        tokens.forward = forward


# --- Micro-batches


class ShardOverwritten(Broken):
    """On the first rank every micro-batch overwrites what the ones before left of one shard."""

    name: ClassVar = "blocks.1.attention.q.weight"

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        grad = dict(self.named())[self.name].grad
        if grad is not None and self.context.rank == 0:
            with torch.no_grad():
                (grad.to_local() if isinstance(grad, DTensor) else grad).zero_()
        with super().micro_batch(last):  # type: ignore[misc]
            yield


# --- Updates


class _ClipsUnits(Broken):
    """Units of parameters are clipped by their own norms."""

    unit: Callable[[str], str]

    def clip(self, max_norm: float) -> None:
        units: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.named():
            units.setdefault(type(self).unit(name), []).append(parameter)
        for parameters in units.values():
            nn.utils.clip_grad_norm_(parameters, max_norm)


class ClipsEachModule(_ClipsUnits):
    unit = staticmethod(lambda name: name.rpartition(".")[0])


class ClipsEachBlock(_ClipsUnits):
    """The embedding and the head are units of their own."""

    unit = staticmethod(lambda name: name.split(".")[1] if name.startswith("blocks.") else name.partition(".")[0])


class BiasesShareCount(Broken):
    """From the second step on the biases share one tensor that counts their steps."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()  # type: ignore[safe-super]
        states = [self.optimizer.state[p] for name, p in self.named() if name.endswith("bias")]
        for state in states:
            state["step"] = states[0]["step"]
        return norm


class CountStartsAtTen(Broken):
    """The moments are fresh, and their count of steps is not."""

    def update(self) -> Tensor | None:
        if self.steps == 1:  # a step's backward pass counts it
            for _, parameter in self.named():
                zero = torch.zeros_like(parameter)
                count = torch.tensor(10.0)
                self.optimizer.state[parameter] = {"step": count, "exp_avg": zero, "exp_avg_sq": zero.clone()}
        return super().update()  # type: ignore[safe-super]


class EpsEarly(Broken):
    """A large eps is added before the second moment's bias is corrected."""

    def update(self) -> Tensor | None:
        before = {n: p.detach().clone() for n, p in self.named()}
        norm: Tensor | None = super().update()
        group = self.optimizer.param_groups[0]
        (first, second), rate = group["betas"], group["lr"]
        with torch.no_grad():
            for name, parameter in self.named():
                state = self.optimizer.state[parameter]
                count = float(state["step"])
                divisor = (state["exp_avg_sq"].sqrt() + 1e-5) / math.sqrt(1 - second**count)
                move = state["exp_avg"] / (1 - first**count) / divisor
                parameter.copy_(before[name] * (1 - rate * group["weight_decay"]) - rate * move)
        return norm
