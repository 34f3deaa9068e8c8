"""How 1-bit Adam, 1-bit LAMB and 0/1 Adam are got wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshmark.algorithms.compressed.compressors import Array
from meshmark.algorithms.compressed.faults import FEEDBACK, LONGER_WARMUP, OF_SERVERS, Faults
from meshmark.algorithms.compressed.transition import DoubleSqueezeTransition
from meshmark.algorithms.contract import Tensors, averaged, combined
from meshmark.algorithms.one_bit.transition import (
    OneBitAdamTransition,
    OneBitLAMBTransition,
    ZeroOneAdamTransition,
    trust,
)


class _Melts(OneBitAdamTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.adapt(averaged(self.widened(gradients))[0])
        return super().directions(gradients)


class _SqueezesGradients(OneBitAdamTransition):
    def squeezed(self, gradients: Sequence[Tensors]) -> Tensors:
        return self.moved(DoubleSqueezeTransition.directions(self, gradients)[0])


class _MomentumReset(OneBitAdamTransition):
    def moved(self, gradient: Tensors) -> Tensors:
        if self.algorithm.compresses(self.steps):
            self.momentum = {}
        return super().moved(gradient)


class _Corrected(OneBitAdamTransition):
    """As Adam corrects its bias."""

    def divided(self, momentum: Tensors) -> Tensors:
        (first, second), steps = self.adam.betas, self.steps + 1
        variance = self.variance
        self.variance = combined((1 / (1 - second ** min(steps, self.warmup_steps)), variance))
        found = super().divided(combined((1 / (1 - first**steps), self.widened([momentum])[0])))
        self.variance = variance
        return found


class _RatesStay(OneBitLAMBTransition):
    def grown(self, name: str) -> float:
        return 1.0


class _RatesOfNorms(OneBitLAMBTransition):
    def rate(self, name: str, update: Array) -> float:
        return trust(self.here[name], update)


class _RatesOfLast(OneBitLAMBTransition):
    def averaged(self, before: float, ratio: float) -> float:
        return ratio


class _MeanRatio(OneBitLAMBTransition):
    def grown(self, name: str) -> float:
        frozen, fresh, eps = self.variance[name], self.fresh[name], self.adam.eps
        ratios = (np.sqrt(frozen) + eps) / (np.sqrt(fresh) + eps)
        return float(ratios[frozen > 0].mean()) if (frozen > 0).any() else 0.0


class _EveryStep(ZeroOneAdamTransition):
    """Replicas meet after every step."""

    def meets_after(self, step: int) -> bool:
        return True


class _OwnMomenta(ZeroOneAdamTransition):
    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        own = self.momenta
        found = super().together(after)
        self.momenta = own
        return found


class _OfLastRate(ZeroOneAdamTransition):
    """The momentum is of what was stepped over the last rate, not the sum of rates."""

    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        self.rates = self.adam.learning_rate * self.adam.rate_factor(self.steps)
        return super().together(after)


class _NotTakenBack(ZeroOneAdamTransition):
    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        met, own, found = self.met, after, super().together(after)[0]
        return [combined((1, found), (-1, self.widened([met])[0]), (1, x)) for x in own]


class _NotEmptied(ZeroOneAdamTransition):
    """The sum of steps is not emptied, and continues to be counted."""

    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        stepped = self.stepped
        found = super().together(after)
        self.met, self.rates, self.stepped = found[0], 0.0, stepped
        return found


class _AdaptsAlways(ZeroOneAdamTransition):
    def adapts_in(self, step: int) -> bool:
        return True


_SQUEEZED: Faults = {
    "the variance goes on after the warm-up": _Melts,
    "gradients are compressed, not momenta": _SqueezesGradients,
    "the momentum is reset": _MomentumReset,
    "moments are corrected for their bias": _Corrected,
}
OF_ONE_BIT_ADAM: Faults = {**_SQUEEZED, **OF_SERVERS, **FEEDBACK, **LONGER_WARMUP}
OF_ONE_BIT_LAMB: Faults = {
    **_SQUEEZED,
    "rates of tensors stay as the warm-up left them": _RatesStay,
    "rates of tensors are of this step's norms, not of the warm-up's": _RatesOfNorms,
    "rates of tensors are the warm-up's last, not their running mean": _RatesOfLast,
    "rates of tensors go by the mean ratio of variances, not the largest": _MeanRatio,
    **OF_SERVERS,
    **FEEDBACK,
    **LONGER_WARMUP,
}
OF_ZERO_ONE_ADAM: Faults = {
    "replicas meet after every step": _EveryStep,
    "momenta stay each replica's own where all meet": _OwnMomenta,
    "the momentum is what was stepped by over the last rate, not over the sum of rates": _OfLastRate,
    "what a replica has stepped by itself is not taken back": _NotTakenBack,
    "what was stepped by is counted again after the meeting": _NotEmptied,
    "the variance moves in every step": _AdaptsAlways,
    **OF_SERVERS,
    **FEEDBACK,
}
