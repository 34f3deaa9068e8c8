"""Defects of any size `by`, relative: of which the smallest that is caught is sought. Mixins over DDP's engine."""

from __future__ import annotations

from torch import Tensor

from tests.broken.engine import ONE_NORM, Broken
from tests.broken.randomness import OtherProbability


class Sized(Broken):
    by: float


class NormGradient(Sized):
    """One norm's gradient."""

    def after_backward(self) -> None:
        for name, grad in self.grads():
            if name == ONE_NORM:
                grad.mul_(1 + self.by)


class AllGradients(Sized):
    """Every gradient."""

    def after_backward(self) -> None:
        for _, grad in self.grads():
            grad.mul_(1 + self.by)


class LearningRate(Sized):
    """The learning rate."""

    def prepare(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 + self.by


class WeightDecay(Sized):
    """The weight decay."""

    def prepare(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 1 + self.by


class SecondBeta(Sized):
    """One less AdamW's second beta."""

    def prepare(self) -> None:
        for group in self.optimizer.param_groups:
            first, second = group["betas"]
            group["betas"] = (first, 1 - (1 - second) * (1 + self.by))


class ClipNorm(Sized):
    """The norm that gradients are clipped to."""

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = super().clip(max_norm * (1 + self.by))
        return norm


class NormTold(Sized):
    """The reported norm of gradients that are clipped rightly."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        return None if norm is None else norm * (1 + self.by)


class LossTold(Sized):
    """The reported loss."""

    def backward(self, batch: object) -> Tensor:
        loss: Tensor = super().backward(batch) * (1 + self.by)  # type: ignore[arg-type]
        return loss


class DropoutProbability(OtherProbability, Sized):
    """The probability of dropout."""


SIZED: dict[str, type[Broken]] = {
    kind.__name__: kind
    for kind in (
        NormGradient,
        AllGradients,
        LearningRate,
        WeightDecay,
        SecondBeta,
        ClipNorm,
        NormTold,
        LossTold,
        DropoutProbability,
    )
}
