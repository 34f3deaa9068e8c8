"""The rivals of Adam and LAMB whose momenta travel as signs, with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshmark.algorithms.compressing import Compressing
from meshmark.algorithms.compressors import Array
from meshmark.algorithms.one_bit import OneBitAdam, OneBitLAMB, ZeroOneAdam, trust
from meshmark.algorithms.replicas import Tensors, UpdateRule, averaged, combined
from meshmark.algorithms.served import DoubleSqueeze
from meshmark.spec.algorithm import AlgorithmSpec
from meshmark.spec.workload import Workload


class _Melts(OneBitAdam):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.adapt(averaged(self.widened(gradients))[0])
        return super().directions(gradients)


class _SqueezesGradients(OneBitAdam):
    def squeezed(self, gradients: Sequence[Tensors]) -> Tensors:
        return self.moved(DoubleSqueeze.directions(self, gradients)[0])


class _MomentumReset(OneBitAdam):
    def moved(self, gradient: Tensors) -> Tensors:
        if self.spec.compresses(self.steps):
            self.momentum = {}
        return super().moved(gradient)


class _Corrected(OneBitAdam):
    """As Adam corrects its bias."""

    def divided(self, momentum: Tensors) -> Tensors:
        (first, second), steps = self.adam.betas, self.steps + 1
        variance = self.variance
        self.variance = combined((1 / (1 - second ** min(steps, self.spec.warmup_steps)), variance))
        found = super().divided(combined((1 / (1 - first**steps), self.widened([momentum])[0])))
        self.variance = variance
        return found


class _RatesStay(OneBitLAMB):
    def grown(self, name: str) -> float:
        return 1.0


class _RatesOfNorms(OneBitLAMB):
    def rate(self, name: str, update: Array) -> float:
        return trust(self.here[name], update)


class _RatesOfLast(OneBitLAMB):
    def averaged(self, before: float, ratio: float) -> float:
        return ratio


class _MeanRatio(OneBitLAMB):
    def grown(self, name: str) -> float:
        frozen, fresh, eps = self.variance[name], self.fresh[name], self.adam.eps
        ratios = (np.sqrt(frozen) + eps) / (np.sqrt(fresh) + eps)
        return float(ratios[frozen > 0].mean()) if (frozen > 0).any() else 0.0


class _EveryStep(ZeroOneAdam):
    """Met, that is."""

    class _Spec(AlgorithmSpec):
        def compresses(self, step: int) -> bool:
            return True

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule], exact: bool = True) -> None:
        super().__init__(workload, rules, exact)
        spec = workload.algorithm
        self.spec = self._Spec(
            kind=spec.kind, period=spec.period, warmup_steps=spec.warmup_steps, compressor=spec.compressor
        )


class _OwnMomenta(ZeroOneAdam):
    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        own = self.momenta
        found = super().together(after)
        self.momenta = own
        return found


class _OfLastRate(ZeroOneAdam):
    """The momentum is of what was stepped over the last rate, not the sum of rates."""

    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        self.rates = self.adam.learning_rate * self.adam.rate_factor(self.steps)
        return super().together(after)


class _NotTakenBack(ZeroOneAdam):
    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        met, own, found = self.met, after, super().together(after)[0]
        return [combined((1, found), (-1, self.widened([met])[0]), (1, x)) for x in own]


class _NotEmptied(ZeroOneAdam):
    """What was stepped by goes on to be counted."""

    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        stepped = self.stepped
        found = super().together(after)
        self.met, self.rates, self.stepped = found[0], 0.0, stepped
        return found


class _AdaptsAlways(ZeroOneAdam):
    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        if not self.spec.adapts(self.steps):
            self.adapt(averaged(self.widened(gradients))[0])
        return super().transition(parameters, gradients)


_SQUEEZED: dict[str, type[Compressing]] = {
    "the variance goes on after the warm-up": _Melts,
    "gradients are compressed, not momenta": _SqueezesGradients,
    "the momentum is reset": _MomentumReset,
    "moments are corrected for their bias": _Corrected,
}
OF_ONE_BIT_ADAM = _SQUEEZED
OF_ONE_BIT_LAMB: dict[str, type[Compressing]] = {
    **_SQUEEZED,
    "rates of tensors stay as the warm-up left them": _RatesStay,
    "rates of tensors are of this step's norms, not of the warm-up's": _RatesOfNorms,
    "rates of tensors are the warm-up's last, not their running mean": _RatesOfLast,
    "rates of tensors go by the mean ratio of variances, not the largest": _MeanRatio,
}
OF_ZERO_ONE_ADAM: dict[str, type[Compressing]] = {
    "replicas meet after every step": _EveryStep,
    "momenta stay each replica's own where all meet": _OwnMomenta,
    "the momentum is what was stepped by over the last rate, not over the sum of rates": _OfLastRate,
    "what a replica has stepped by itself is not taken back": _NotTakenBack,
    "what was stepped by is counted again after the meeting": _NotEmptied,
    "the variance moves in every step": _AdaptsAlways,
}
