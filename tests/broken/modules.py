"""Single modules that compute wrongly, in the forward or in the backward pass alone: `--localise` must name them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.judge.beginning import Direction
from meshmark.judge.faults import Fault
from tests.broken.engine import Broken


class OneModule(Broken):
    """Puts another forward in the place of one module's."""

    module_name: ClassVar[str]
    direction: ClassVar[Direction]
    parameter: ClassVar[str] = ""
    """Whose gradient alone is wrong."""

    def prepare(self) -> None:
        inner: nn.Module = self.inner()  # type: ignore[attr-defined]
        module = inner.get_submodule(self.module_name)
        module.forward = self.instead(module, module.forward)  # type: ignore[method-assign]

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The wrong forward."""
        raise NotImplementedError


class _Backward(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ANN401
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.change(gradients[0]), None


class ForwardScaled(OneModule):
    """A projection's output is a little too large."""

    module_name, direction = "blocks.0.attention.q", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: forward(x) * 1.0001


class WeightRounded(OneModule):
    """A projection computes with its weight in bf16."""

    module_name, direction = "blocks.1.feed_forward.up", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: F.linear(x, module.weight.bfloat16().float(), module.bias)


class OtherGelu(OneModule):
    """GELU by its exact form, where the model has the tanh approximation."""

    module_name, direction = "blocks.1.feed_forward", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: module.down(F.gelu(module.up(x)))


class OtherEpsilonOfOne(OneModule):
    """A norm with another epsilon."""

    module_name, direction = "blocks.1.attention_norm", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: F.layer_norm(x, x.shape[-1:], module.weight, module.bias, 1e-3)


class SeesTheNextToken(OneModule):
    """Attention without its causal mask."""

    module_name, direction = "blocks.0.attention", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        module.causal = False
        return forward


class OneElement(OneModule):
    """One number of the final norm's output is off."""

    module_name, direction = "head.norm", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def other(x: Tensor) -> Tensor:
            y: Tensor = forward(x).clone()
            y[0, 3, 5] += 1e-3
            return y

        return other


class OnRankOne(OneModule):
    """On the last rank alone."""

    module_name, direction = "blocks.0.feed_forward.down", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        scale = 1.001 if self.context.rank == self.context.world_size - 1 else 1.0
        return lambda x: forward(x) * scale


class BackwardScaled(OneModule):
    """The gradient that a projection passes on is a little too large."""

    module_name, direction = "blocks.1.feed_forward.down", Direction.BACKWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: _Backward.apply(forward(x), lambda g: g * 1.0001)


class NormPassesOn(OneModule):
    """A norm passes on a little of the gradients of other positions."""

    module_name, direction = "blocks.0.attention_norm", Direction.BACKWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: forward(_Backward.apply(x, lambda g: g + 1e-3 * g.roll(1, 1)))


class ValueDetached(OneModule):
    """No gradient flows through a projection to what is before it."""

    module_name, direction = "blocks.1.attention.v", Direction.BACKWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: forward(_Backward.apply(x, torch.zeros_like))


class WeightGradientHalved(OneModule):
    """The gradient of one weight is wrong; what is passed on is right."""

    module_name, direction, parameter = "blocks.0.feed_forward.up", Direction.BACKWARD, "weight"

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: F.linear(x, _Backward.apply(module.weight, lambda g: g / 2), module.bias)


class BiasGradientLost(OneModule):
    """The gradient of one bias misses a position."""

    module_name, direction, parameter = "blocks.1.attention.out", Direction.BACKWARD, "bias"

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: F.linear(x, module.weight, _Backward.apply(module.bias, lambda g: g * 0.99))


class ResidualForgotten(OneModule):
    """Around a block's feed-forward network the residual's gradient is too small."""

    module_name, direction = "blocks.1", Direction.BACKWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def other(x: Tensor) -> Tensor:
            middle = _Backward.apply(x, lambda g: 0.99 * g) + module.attention(module.attention_norm(x))
            out: Tensor = middle + module.feed_forward(module.feed_forward_norm(middle))
            return out

        return other


class TokensDropped(OneModule):
    """Experts take no more tokens than 1.1 times an even share. For a mixture of experts."""

    module_name, direction = "blocks.0.feed_forward", Direction.FORWARD

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def capped(x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            scores = module.gate(tokens)
            chosen = module.route(scores)
            weights = module.weigh(scores.gather(1, chosen))
            out = torch.zeros_like(tokens)
            capacity = math.ceil(1.1 * chosen.numel() / len(module.experts))
            for index, expert in enumerate(module.experts):
                token, place = ((chosen == index).nonzero(as_tuple=True)[i][:capacity] for i in (0, 1))
                out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
            return out.view_as(x)

        return capped


ONE_MODULE: tuple[type[OneModule], ...] = (
    ForwardScaled,
    WeightRounded,
    OtherGelu,
    OtherEpsilonOfOne,
    SeesTheNextToken,
    OneElement,
    OnRankOne,
    BackwardScaled,
    NormPassesOn,
    ValueDetached,
    WeightGradientHalved,
    BiasGradientLost,
    ResidualForgotten,
)
NAMED: dict[type[OneModule], tuple[Fault, ...]] = {
    WeightRounded: (Fault.PRECISION,),
    OtherGelu: (Fault.VARIANT,),
    OtherEpsilonOfOne: (Fault.VARIANT,),
    SeesTheNextToken: (Fault.VARIANT,),
}
"""What a diagnosis names too, without `--localise`."""
