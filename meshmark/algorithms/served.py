"""Algorithms that compress twice, on the way to a server and back, and feed back what is lost on both. C is one of
`compressors`, of every tensor alone; e_i is kept by replica i, e by the server.

- DoubleSqueeze (arXiv:1905.05957, algorithm 1): p_i = g_i + e_i, e_i <- p_i - C(p_i), s = mean_i C(p_i) + e,
  d = C(s), e <- s - d
- 1-bit Adam (arXiv:2102.02888, algorithm 1). In the warm-up, of the mean gradient g: m <- B1 m + (1 - B1) g,
  v <- B2 v + (1 - B2) g^2. After it v stays, and m is what DoubleSqueeze makes of m_i = B1 m + (1 - B1) g_i. Always
  d = m / (sqrt(v) + eps). Signs move what never had a gradient too, and there v is zero: so is d (as DeepSpeed's mask)

The server decides by the bits that it has: it sums in order of the replicas, in the gradients' own format.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshmark.algorithms.compressing import ErrorFeedback
from meshmark.algorithms.compressors import Array
from meshmark.algorithms.replicas import Tensors, UpdateRule, averaged, combined
from meshmark.spec.workload import Workload


class DoubleSqueeze(ErrorFeedback):
    left_of_server: Tensors | None = None

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        back = self.sent_back(self.sent(gradients))
        return [back for _ in gradients]

    def sent_back(self, told: Sequence[Tensors]) -> Tensors:
        """What all know of what the server makes of what it is told."""
        wanted = self.wanted_back({name: in_order([t[name] for t in told]) for name in told[0]})
        found = {name: self.told_back(name, x) for name, x in wanted.items()}
        self.left_of_server = combined((1, wanted), (-1, found))
        return found

    def wanted_back(self, mean: Tensors) -> Tensors:
        """s."""
        return mean if self.left_of_server is None else combined((1, mean), (1, self.left_of_server))

    def told_back(self, name: str, x: Array) -> Array:
        return self.told(x, self.draw(0, name))


class OneBitAdam(DoubleSqueeze):
    """Each replica's gradients are, in the warm-up, the mean of all, bit for bit."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule], exact: bool = True) -> None:
        super().__init__(workload, rules, exact)
        self.adam = workload.optimizer
        self.momentum: Tensors = {}
        self.variance: Tensors = {}

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        whole = super().reported(own)
        return averaged(whole) if self.spec.reduces_gradients(self.steps) else whole

    def whole(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.adapt(gradients[0])
        self.momentum = self.moved(gradients[0])
        return self.preconditioned(gradients)

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.momentum = super().directions([self.moved(own) for own in gradients])[0]
        return self.preconditioned(gradients)

    def moved(self, gradient: Tensors) -> Tensors:
        """The momentum, by one replica's gradient."""
        beta = self.adam.betas[0]
        before = self.momentum or {name: np.zeros_like(g) for name, g in gradient.items()}
        return combined((beta, before), (1 - beta, gradient))

    def adapt(self, gradient: Tensors) -> None:
        beta = self.adam.betas[1]
        squares = {name: np.square(g) for name, g in self.widened([gradient])[0].items()}
        before = self.variance or {name: np.zeros_like(g) for name, g in squares.items()}
        self.variance = combined((beta, before), (1 - beta, squares))

    def preconditioned(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        """d, for every replica."""
        eps = self.adam.eps
        momentum = self.widened([self.momentum])[0]
        found = {n: m / (np.sqrt(self.variance[n]) + eps) * (self.variance[n] > 0) for n, m in momentum.items()}
        return [found for _ in gradients]


def in_order(parts: Sequence[Array]) -> Array:
    """The mean, in the format of the parts."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / total.dtype.type(len(parts))
