"""The rivals of what goes by a server: algorithms that compress both ways, with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.algorithms.compressing import Compressing
from meshmark.algorithms.compressors import Array
from meshmark.algorithms.replicas import Tensors, averaged, combined
from meshmark.algorithms.served import DoubleSqueeze, OneBitAdam


class _ServerForgets(DoubleSqueeze):
    def wanted_back(self, mean: Tensors) -> Tensors:
        return mean


class _ServerAddsTwice(DoubleSqueeze):
    def wanted_back(self, mean: Tensors) -> Tensors:
        return super().wanted_back(super().wanted_back(mean))


class _ServerSendsAll(DoubleSqueeze):
    def told_back(self, name: str, x: Array) -> Array:
        return x


class _Melts(OneBitAdam):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.adapt(averaged(gradients)[0])
        return super().directions(gradients)


class _SqueezesGradients(OneBitAdam):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.momentum = self.moved(DoubleSqueeze.directions(self, gradients)[0])
        return self.preconditioned(gradients)


class _MomentumReset(OneBitAdam):
    def moved(self, gradient: Tensors) -> Tensors:
        if self.spec.compresses(self.steps):
            self.momentum = {}
        return super().moved(gradient)


class _Corrected(OneBitAdam):
    """As Adam corrects its bias."""

    def preconditioned(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        (first, second), steps = self.adam.betas, self.steps + 1
        momentum, variance = self.momentum, self.variance
        self.momentum = combined((1 / (1 - first**steps), momentum))
        self.variance = combined((1 / (1 - second ** min(steps, self.spec.warmup_steps)), variance))
        found = super().preconditioned(gradients)
        self.momentum, self.variance = momentum, variance
        return found


OF_SERVERS: dict[str, type[Compressing]] = {
    "what the server has left is forgotten": _ServerForgets,
    "what the server has left is added twice": _ServerAddsTwice,
    "the server sends its mean as it is": _ServerSendsAll,
}
OF_ONE_BIT_ADAM: dict[str, type[Compressing]] = {
    "the variance goes on after the warm-up": _Melts,
    "gradients are compressed, not momenta": _SqueezesGradients,
    "the momentum is reset": _MomentumReset,
    "moments are corrected for their bias": _Corrected,
}
