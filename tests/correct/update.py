"""Data parallelism by hand: norm, clipping and AdamW by other formulas. Gradients are reduced tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshmark.models.module import parameter_shapes
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, parameter_groups, reference_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe, UpdateForm, eager_recipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException
from tests.correct.reduction import TensorByTensor, TensorByTensorHand, beside_gradients

# --- Norm and clipping.


class ClippedByHand(TensorByTensor):
    """The root of the sum of squares, and a factor on every gradient."""

    def clip(self, max_norm: float) -> Tensor:
        gradients = self.gradients_held()
        norm = sum((g.square().sum() for g in gradients), torch.zeros(())).sqrt()
        for gradient in gradients:
            gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


class WideNorm(TensorByTensor):
    """In float64, and gradients are divided, only where they must be."""

    def clip(self, max_norm: float) -> Tensor:
        gradients = self.gradients_held()
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]).norm()
        if norm > max_norm:
            for gradient in gradients:
                gradient.div_((norm + 1e-6) / max_norm)
        return norm.float()


class SharedNorm(TensorByTensor):
    """Every rank sums the squares of some tensors, and ranks add these up."""

    def clip(self, max_norm: float) -> Tensor:
        gradients = self.gradients_held()
        own = gradients[self.context.rank :: self.context.world_size]
        squares = torch.stack([g.double().square().sum() for g in own]).sum().float()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, squares.sqrt())
        return squares.sqrt()


class ClippedByHandHand(TensorByTensorHand):
    engine = ClippedByHand


class WideNormHand(TensorByTensorHand):
    engine = WideNorm


class SharedNormHand(TensorByTensorHand):
    engine = SharedNorm

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        group = case.layout.group("dp", rank)
        norm = Flow(kind="all_reduce", axes="dp", ranks=group, purpose=Purpose.NORM, num_bytes=4, fewest=1, most=1)
        return (TrafficException(sends=(norm,), reason="ranks share out the norm's tensors"),)


# --- AdamW.


class AdamWByHand(Optimizer):
    """AdamW, whose update of one parameter is `rule`."""

    def __init__(self, groups: Any, rule: Rule, **defaults: Any) -> None:  # noqa: ANN401
        super().__init__(groups, defaults)
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                state["step"] += 1
                self.rule(parameter, parameter.grad, state, group)


Rule = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None]


def folded(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Bias corrections are folded into the rate and into epsilon (arXiv:1412.6980, section 2)."""
    (beta1, beta2), t, rate = group["betas"], state["step"], group["lr"]
    state["mean"].lerp_(gradient, 1 - beta1)
    state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = math.sqrt(1 - beta2**t)
    parameter.mul_(1 - rate * group["weight_decay"])
    below = state["square"].sqrt().add_(group["eps"] * root)
    parameter.addcdiv_(state["mean"], below, value=-rate * root / (1 - beta1**t))


def decayed_last(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Decay is subtracted with the update, in one sum; moments move by a part of their distance."""
    (beta1, beta2), t, rate = group["betas"], state["step"], group["lr"]
    state["mean"].add_(gradient - state["mean"], alpha=1 - beta1)
    state["square"].add_(gradient.square().sub_(state["square"]), alpha=1 - beta2)
    change = (state["square"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
    change.reciprocal_().mul_(state["mean"]).div_(1 - beta1**t)
    parameter.sub_(change.add_(parameter, alpha=group["weight_decay"]), alpha=rate)


def in_float64(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The whole update of a parameter in float64, rounded once; moments too."""
    (beta1, beta2), t, rate = group["betas"], state["step"], group["lr"]
    wide = gradient.double()
    mean = beta1 * state["mean"].double() + (1 - beta1) * wide
    square = beta2 * state["square"].double() + (1 - beta2) * wide**2
    state["mean"].copy_(mean)
    state["square"].copy_(square)
    change = mean / (1 - beta1**t) / ((square / (1 - beta2**t)).sqrt() + group["eps"])
    parameter.copy_(parameter.double() * (1 - rate * group["weight_decay"]) - rate * change)


class OtherAdamW(TensorByTensorHand):
    rule: ClassVar[Rule]

    def optimizer(self, case: Case, model: nn.Module) -> Optimizer:
        spec = case.workload.optimizer
        _, arguments = reference_optimizer(spec).arguments()
        return AdamWByHand(parameter_groups(spec, model.named_parameters()), type(self).rule, **arguments)


class FoldedCorrectionHand(OtherAdamW):
    rule = staticmethod(folded)


class DecayedLastHand(OtherAdamW):
    rule = staticmethod(decayed_last)


class WideUpdateHand(OtherAdamW):
    rule = staticmethod(in_float64)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Seven float64 tensors: gradient, moments, change; the parameter, the change times the rate, and their sum."""
        largest = max(map(math.prod, parameter_shapes(case.workload.model).values()))
        num_bytes = 7 * Dtype.FP64.itemsize * largest
        return (beside_gradients(cls, case, rank, num_bytes, "the update's temporaries are in float64"),)


class OtherForm(TensorByTensorHand):
    """PyTorch's AdamW in another of its forms."""

    form: ClassVar[UpdateForm]
    options: ClassVar[dict[str, bool]]

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return replace(eager_recipe(case), update=cls.form)

    def optimizer(self, case: Case, model: nn.Module) -> Optimizer:
        return reference_optimizer(case.workload.optimizer).build(model.named_parameters(), **self.options)


class ForeachHand(OtherForm):
    form = UpdateForm.FOREACH
    options = {"foreach": True}


class FusedHand(OtherForm):
    form = UpdateForm.FUSED
    options = {"fused": True}


class GroupEachHand(TensorByTensorHand):
    """Every parameter is a group of its own, the last one first."""

    def optimizer(self, case: Case, model: nn.Module) -> Optimizer:
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters())
        groups = [{**group, "params": [p]} for group in optimizer.param_groups for p in group["params"]]
        return type(optimizer)(groups[::-1])


class LazyOptimizer(TensorByTensor):
    """The optimizer is built at every step, with the states of the last one: before the loss scaler, which knows
    optimizers by their id, first meets it."""

    def backward(self, batch: Batch) -> Tensor:
        last = self.optimizer
        self.optimizer = type(last)(last.param_groups)
        self.optimizer.state.update(last.state)
        return super().backward(batch)


class LazyOptimizerHand(TensorByTensorHand):
    engine = LazyOptimizer


class FactorInUpdate(TensorByTensor):
    """Clipping is a factor that the optimizer is told; each gradient is multiplied just before its own update."""

    def clip(self, max_norm: float) -> Tensor:
        norm = nn.utils.get_total_norm(self.gradients_held())
        self.optimizer.factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # type: ignore[attr-defined]
        return norm


class FactorInUpdateHand(OtherAdamW):
    engine = FactorInUpdate

    @staticmethod
    def rule(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        folded(parameter, gradient, state, group)

    def optimizer(self, case: Case, model: nn.Module) -> Optimizer:
        made = super().optimizer(case, model)
        rule = made.rule
        made.rule = lambda parameter, gradient, *more: rule(parameter, gradient * made.factor, *more)
        return made
