"""Adam and LAMB whose momenta travel as signs, squeezed by a server as under DoubleSqueeze. Signs move what never had a
gradient too: there the variance v is zero, and so is the step d (as DeepSpeed's mask). g is the mean gradient, B1 and
B2 are Adam's, W the weight decay and r the learning rate.

- 1-bit Adam (arXiv:2102.02888, algorithm 1). In the warm-up: m <- B1 m + (1 - B1) g, v <- B2 v + (1 - B2) g^2. After it
  v stays, and m is what DoubleSqueeze makes of m_i = B1 m + (1 - B1) g_i. Always d = m / (sqrt(v) + eps)
- 1-bit LAMB (arXiv:2104.06069, algorithm 1), tensor by tensor. Moments as 1-bit Adam's, u = m / (sqrt(v) + eps) + W x,
  d = c u. In the warm-up c = |x| / |u|, within bounds, and a <- B3 a + (1 - B3) c. After it a stays; the gradient that
  the squeezed momentum tells of, h = (m' - B1 m) / (1 - B1), moves a variance of its own, w <- B2 w + (1 - B2) h^2 from
  v on; and c = f a, where f = max((sqrt(v) + eps) / (sqrt(w) + eps)), within bounds and near the last f. (The paper
  scales momenta to be of one size before one scale is taken of all; here each tensor has a scale.)
- 0/1 Adam (arXiv:2202.06009, algorithm 1), x_i = y where replicas last met: m_i <- B1 m_i + (1 - B1) g_i,
  x_i <- x_i - r d_i with d_i = m_i / (sqrt(v) + eps), u_i <- u_i + r m_i. Where they meet: U is what DoubleSqueeze
  makes of u_i, x_i <- y - U / (sqrt(v) + eps), m_i <- U / (sum of r since), u_i <- 0. Where v is due,
  v <- B2 v + (1 - B2) g^2 before the step (as in DeepSpeed; after it in the paper, whose first step would be divided
  by eps alone)

What signs are taken of is made of the run's own gradients in their own format, as the run makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from meshmark.algorithms.compressed.compressors import Array
from meshmark.algorithms.compressed.transition import DoubleSqueezeTransition
from meshmark.algorithms.contract import Tensors, UpdateRule, averaged, combined
from meshmark.algorithms.one_bit import SignMomenta, ZeroOneAdam
from meshmark.algorithms.one_bit.lamb_rates import AVERAGED, FACTORS, NEAR, RATIOS
from meshmark.spec.workload import Workload


class MomentsTransition(DoubleSqueezeTransition):
    """The moments that all of them keep."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule], exact: bool = True) -> None:
        super().__init__(workload, rules, exact)
        self.adam = workload.optimizer
        self.warmup_steps = cast(SignMomenta, workload.algorithm).warmup_steps
        self.momentum: Tensors = {}
        self.variance: Tensors = {}

    def moved(self, gradient: Tensors) -> Tensors:
        """The momentum, by one replica's gradient."""
        beta = self.adam.betas[0]
        before = self.momentum or {name: np.zeros_like(g) for name, g in gradient.items()}
        return combined((beta, before), (1 - beta, gradient))

    def adapt(self, gradient: Tensors) -> None:
        self.variance = self.squared(self.variance, gradient)

    def squared(self, before: Tensors, gradient: Tensors) -> Tensors:
        """The next variance."""
        beta = self.adam.betas[1]
        squares = {name: np.square(g) for name, g in self.widened([gradient])[0].items()}
        before = before or {name: np.zeros_like(g) for name, g in squares.items()}
        return combined((beta, before), (1 - beta, squares))

    def divided(self, momentum: Tensors) -> Tensors:
        """Return the momentum divided by the root of the variance."""
        eps, v = self.adam.eps, self.variance
        return {n: m / (np.sqrt(v[n]) + eps) * (v[n] > 0) for n, m in self.widened([momentum])[0].items()}


class OneBitAdamTransition(MomentsTransition):
    """Each replica's gradients are, in the warm-up, the mean of all, bit for bit."""

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        whole = super().reported(own)
        return averaged(whole) if self.algorithm.reduces_gradients(self.steps) else whole

    def whole(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.adapt(gradients[0])
        self.momentum = self.moved(gradients[0])
        return self.preconditioned(gradients)

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.momentum = self.squeezed(gradients)
        return self.preconditioned(gradients)

    def squeezed(self, gradients: Sequence[Tensors]) -> Tensors:
        """The next momentum."""
        return super().directions([self.moved(own) for own in gradients])[0]

    def preconditioned(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        """d, for every replica."""
        found = self.divided(self.momentum)
        return [found for _ in gradients]


class OneBitLAMBTransition(OneBitAdamTransition):
    def __init__(self, workload: Workload, rules: Sequence[UpdateRule], exact: bool = True) -> None:
        super().__init__(workload, rules, exact)
        self.fresh: Tensors = {}
        """w."""
        self.average: dict[str, float] = {}
        """a, by tensor."""
        self.factor: dict[str, float] = {}
        """f."""

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        self.here = self.widened(parameters)[0]
        return super().transition(parameters, gradients)

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        before, self.momentum = self.momentum, self.squeezed(gradients)
        beta, (now, before) = self.adam.betas[0], self.widened([self.momentum, before])
        told = combined((1 / (1 - beta), now), (-beta / (1 - beta), before))
        self.fresh = self.squared(self.fresh or self.variance, told)
        return self.preconditioned(gradients)

    def preconditioned(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        found = {name: self.rate(name, u) * u for name, u in self.updates().items()}
        return [found for _ in gradients]

    def updates(self) -> Tensors:
        """u."""
        decay = {name: self.adam.weight_decay * self.adam.decays(name) for name in self.momentum}
        return {name: x + decay[name] * self.here[name] for name, x in self.divided(self.momentum).items()}

    def rate(self, name: str, update: Array) -> float:
        """c."""
        if self.algorithm.compresses(self.steps):
            self.factor[name] = within(self.grown(name), self.factor.get(name, 1.0))
            return self.factor[name] * self.average[name]
        ratio = trust(self.here[name], update)
        self.average[name] = self.averaged(self.average.get(name, 0.0), ratio)
        return ratio

    def averaged(self, before: float, ratio: float) -> float:
        """The next a."""
        return AVERAGED * before + (1 - AVERAGED) * ratio

    def grown(self, name: str) -> float:
        """f, before it is bounded; over what is trained at all."""
        frozen, fresh, eps = self.variance[name], self.fresh[name], self.adam.eps
        ratios = (np.sqrt(frozen) + eps) / (np.sqrt(fresh) + eps)
        return float(ratios[frozen > 0].max(initial=0.0))


class ZeroOneAdamTransition(MomentsTransition):
    """Replicas differ where they have stepped alone since they met."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule], exact: bool = True) -> None:
        super().__init__(workload, rules, exact)
        self.momenta: list[Tensors] = [{} for _ in rules]
        self.stepped: list[Tensors] = []
        """u, by replica; empty where they have met."""
        self.rates = 0.0
        """The sum of learning rates since."""

    def adapts_in(self, step: int) -> bool:
        return cast(ZeroOneAdam, self.algorithm).adapts(step)

    def meets_after(self, step: int) -> bool:
        return self.algorithm.compresses(step)

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        if not self.stepped:
            self.met, self.rates = parameters[0], 0.0
        if self.adapts_in(self.steps):
            self.adapt(averaged(self.widened([gradients[i] for i in self.order or range(len(gradients))]))[0])
        self.momenta = [self.moved_from(m, own) for m, own in zip(self.momenta, gradients, strict=True)]
        rate = self.adam.learning_rate * self.adam.rate_factor(self.steps)
        self.rates += rate
        by = [combined((rate, m)) for m in self.momenta]
        pairs = zip(self.stepped, by, strict=bool(self.stepped))
        self.stepped = [combined((1, u), (1, more)) for u, more in pairs] or by
        self.taken = [self.divided(m) for m in self.momenta]
        after = self.alone(parameters, self.taken)
        if self.meets_after(self.steps):
            after = self.together(after)
        self.steps += 1
        return after

    def moved_from(self, momentum: Tensors, gradient: Tensors) -> Tensors:
        self.momentum = momentum
        return self.moved(gradient)

    def together(self, after: Sequence[Tensors]) -> list[Tensors]:
        """Where all meet, who had come to `after`."""
        all_by = self.directions(self.stepped)[0]
        self.momenta = [combined((1 / self.rates, all_by)) for _ in after]
        self.stepped = []
        there = combined((1, self.widened([self.met])[0]), (-1, self.divided(all_by)))
        return [there for _ in after]


def trust(x: Array, update: Array) -> float:
    """|x| / |u|, within bounds; one where either is zero."""
    of, to = float(np.linalg.norm(x)), float(np.linalg.norm(update))
    least, most = RATIOS
    return min(max(of / to, least), most) if of and to else 1.0


def within(factor: float, last: float) -> float:
    """The factor's bounds, and how far it may be from the last one."""
    least, most = FACTORS
    return min(max(factor, least, (1 - NEAR) * last), most, (1 + NEAR) * last)
