"""Decentralised algorithms that end at the optimum whatever each replica's own is, with a constant step r:

- gradient tracking (DIGing; Nedic, Olshevsky and Shi, arXiv:1607.03218):
  y_i(t) = sum_j W_ij y_j(t-1) + g_i(t) - g_i(t-1), from y(0) = g(0);  x_i <- sum_j W_ij x_j - r y_i.
  The mean of all y is the mean of all g: what is tracked.
- exact diffusion (Yuan et al., arXiv:1702.05122; D2, Tang et al., arXiv:1803.07068), with V = (I + W) / 2:
  p_i(t) = x_i(t) - r g_i(t);  x_i <- sum_j V_ij (p_j(t) + x_j(t) - p_j(t-1)), at first sum_j V_ij p_j
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.algorithms.decentralised import Decentralised, both, parted
from meshmark.algorithms.replicas import Tensors, combined
from meshmark.spec.graph import Matrix, lazy


class GradientTracking(Decentralised):
    """The rules step on what is tracked."""

    tracked: list[Tensors] | None = None
    last: Sequence[Tensors] = ()

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        if self.tracked is None:
            return list(parameters)
        return [both(x, y) for x, y in zip(parameters, self.tracked, strict=True)]

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        there, tracked = parted(heard)
        if self.tracked is None:
            self.tracked = list(gradients)
        else:
            changes = map(self.change, gradients, self.last)
            self.tracked = [combined((1, change), (1, y)) for change, y in zip(changes, tracked, strict=True)]
        self.last = gradients
        return self.moved(parameters, self.tracked, there)

    def change(self, now: Tensors, before: Tensors) -> Tensors:
        return combined((1, now), (-1, before))


class ExactDiffusion(Decentralised):
    alone_before: list[Tensors] | None = None

    def matrix(self) -> Matrix:
        return lazy(super().matrix())

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        now, before = self.alone(parameters, gradients), self.alone_before
        self.alone_before = now
        if before is None:
            return now
        return [combined((1, p), (1, x), (-1, q)) for p, x, q in zip(now, parameters, before, strict=True)]
