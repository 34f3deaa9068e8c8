"""Starts and updates that are wrong without an error. Mixins over engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshmark.models.module import initial_value
from tests.broken.engine import ONE_NORM, Broken


class OtherSeed(Broken):
    def prepare(self) -> None:
        spec = self.case.workload.model
        with torch.no_grad():
            for name, parameter in self.named():
                if "norm" not in name and "bias" not in name:
                    parameter.copy_(initial_value(spec, name, parameter.shape, seed=1))


class Bf16Start(Broken):
    def prepare(self) -> None:
        self.put([p.bfloat16() for p in self.locals()])


class RankStartsElsewhere(Broken):
    """Nobody broadcasts."""

    def prepare(self) -> None:
        if self.context.rank == 1:
            self.put([p + 1e-3 for p in self.locals()])


class NormInBf16(Broken):
    """All masters are wide but one norm's."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        with torch.no_grad():
            for name, parameter in self.named():
                if name == ONE_NORM:
                    parameter.copy_(parameter.bfloat16())
        return norm


class NeverUpdates(Broken):
    def update(self) -> Tensor | None:
        before = [p.clone() for p in self.locals()]
        norm: Tensor | None = super().update()
        self.put(before)
        return norm


class RankNeverUpdates(Broken):
    """The second rank keeps its parameters (an update that is not sent to all)."""

    def update(self) -> Tensor | None:
        before = [p.clone() for p in self.locals()]
        norm: Tensor | None = super().update()
        if self.context.rank == 1:
            self.put(before)
        return norm


class OneForgotten(Broken):
    """The optimizer holds a parameter that something has replaced (accelerate#2665)."""

    def prepare(self) -> None:
        kept = dict(self.named())[ONE_NORM] if ONE_NORM in dict(self.named()) else None
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not kept]


class StaleUpdate(Broken):
    """The optimizer steps with the gradients of a step ago."""

    def update(self) -> Tensor | None:
        fresh = {name: grad.clone() for name, grad in self.grads()}
        with torch.no_grad():
            for name, grad in self.grads():
                grad.copy_(getattr(self, "late", fresh)[name])
        self.late = fresh
        norm: Tensor | None = super().update()
        return norm


class NoClipping(Broken):
    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = super().clip(float("inf"))
        return norm

    _clip = clip


class PipelineNoClipping(Broken):
    def _clip(self, max_norm: float) -> Tensor:
        norm: Tensor = super()._clip(float("inf"))
        return norm


class ClipsEach(Broken):
    def clip(self, max_norm: float) -> Tensor | None:
        for _, parameter in self.named():
            if parameter.grad is not None:
                nn.utils.clip_grad_norm_([parameter], max_norm)
        return None


class ClipsValues(Broken):
    def clip(self, max_norm: float) -> Tensor | None:
        nn.utils.clip_grad_value_([p for _, p in self.named()], max_norm / 10)
        return None


class OwnNorm(Broken):
    """Each rank clips by the norm of what it holds (DeepSpeed#1801)."""

    def clip(self, max_norm: float) -> Tensor:
        grads = [grad for _, grad in self.grads()]
        norm = nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.mul_((max_norm / norm).clamp(max=1.0))
        return norm

    _clip = clip


class CountsReplicas(Broken):
    """The norm's square is summed over ranks that hold the same."""

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = super().clip(float("inf")) * self.context.world_size**0.5
        for _, grad in self.grads():
            grad.mul_(max_norm / norm)
        return norm


class Option(Broken):
    """An option of the optimizer that is not the one asked for."""

    options: dict[str, Any]

    def prepare(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(self.options)


class NoWeightDecay(Option):
    options = {"weight_decay": 0.0}


class CoupledDecay(Option):
    options = {"decoupled_weight_decay": False}


class OtherBetas(Option):
    options = {"betas": (0.9, 0.999)}


class OtherEps(Option):
    options = {"eps": 1e-6}


class DoubleRate(Option):
    """The learning rate scaled with the number of ranks."""

    options = {"lr": 2e-3}


class NoBiasCorrection(Broken):
    def update(self) -> Tensor | None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                state = self.optimizer.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p))
                state.setdefault("exp_avg_sq", torch.zeros_like(p))
                state["step"] = torch.tensor(1e9)
        norm: Tensor | None = super().update()
        return norm


class ForgetsStates(Broken):
    """As after a resume that does not load the optimizer, every step."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        self.optimizer.state.clear()
        return norm


class ForgetsMomentum(ForgetsStates):
    """The same, where it is all that there is."""


class Nesterov(Option):
    """A look-ahead that nobody asked for."""

    options = {"nesterov": True}


class NoNesterov(Option):
    options = {"nesterov": False}


class Dampened(Option):
    """A gradient enters the momentum with what the momentum leaves, as in a mean."""

    options = {"dampening": 0.9}


class OtherBeta2Decay(Option):
    """Adafactor whose second moments are kept for less long."""

    options = {"beta2_decay": -0.5}


class NotOrthogonal(Option):
    """Muon without its iteration: a normalised momentum."""

    options = {"ns_steps": 0}


class OneRateForAll(Option):
    """LARS or LAMB without what makes it so."""

    options = {"layer_wise": False}


class OneRate(OneRateForAll): ...


class ForgetsLarsMomentum(ForgetsStates): ...


class ForgetsLambMoments(ForgetsStates): ...


class LarsWithoutDecay(Option):
    options = {"weight_decay": 0.0}


class LambWithoutDecay(LarsWithoutDecay): ...


class OtherLarsMomentum(Option):
    options = {"momentum": 0.99}


class OtherLambBetas(Option):
    options = {"betas": (0.9, 0.999)}


class Bf16Weights(Broken):
    """No master weights."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        self.put([p.bfloat16() for p in self.locals()])
        return norm


class Bf16Moments(Broken):
    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        for moment in self.moments():
            moment.copy_(moment.bfloat16())
        return norm


class Bf16States(Broken):
    """accelerate#2624: the moments are kept in bf16, and memory looks better than it is."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        for state in self.inner_optimizer().state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16()
        return norm

    def backward(self, batch: Any) -> Tensor:  # noqa: ANN401
        loss: Tensor = super().backward(batch)
        for state in self.inner_optimizer().state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].float()
        return loss
