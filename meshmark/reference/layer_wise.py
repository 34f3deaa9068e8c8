"""LARS and LAMB, which PyTorch has not: a learning rate for every tensor, by its norm over that of its update.

- LARS (You, Gitman and Ginsburg, arXiv:1708.03888, algorithm 1): u = g + d w, m <- B m + r T |w| / (|g| + d |w|) u,
  w <- w - m, with T = 0.001
- LAMB (You et al., arXiv:1904.00962, algorithm 2, phi the identity): with Adam's corrected moments m, v,
  u = m / (sqrt(v) + eps) + d w, w <- w - r |w| / |u| u

Where a norm is zero, as a bias begins, there is no ratio of norms, and one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

TRUST = 0.001
"""LARS's coefficient: the paper's."""


class LayerWise(Optimizer):
    """`layer_wise`: whether tensors have learning rates of their own."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **options: Any) -> None:  # noqa: ANN401
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "layer_wise": True, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, self.state[parameter], group)

    def move(self, w: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError


class LARS(LayerWise):
    def move(self, w: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        decay, rate = group["weight_decay"], torch.tensor(group["lr"], dtype=w.dtype, device=w.device)
        if group["layer_wise"]:
            rate = rate * _ratio(TRUST * w.norm(), g.norm() + decay * w.norm())
        update = rate * g.add(w, alpha=decay)
        if group["momentum"]:
            kept = state.setdefault("momentum_buffer", torch.zeros_like(w))
            update = kept.mul_(group["momentum"]).add_(update)
        w.sub_(update)


class LAMB(LayerWise):
    def move(self, w: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
        state["step"] += 1
        (first, second), steps = group["betas"], float(state["step"])
        mean = state["exp_avg"].mul_(first).add_(g, alpha=1 - first) / (1 - first**steps)
        square = state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second) / (1 - second**steps)
        update = mean.div_(square.sqrt_().add_(group["eps"])).add_(w, alpha=group["weight_decay"])
        if group["layer_wise"]:
            update.mul_(_ratio(w.norm(), update.norm()))
        w.sub_(update, alpha=group["lr"])


def _ratio(of: Tensor, to: Tensor) -> Tensor:
    """Return the ratio, or 1 where either is zero."""
    return torch.where((of > 0) & (to > 0), of / to, torch.ones_like(of))
