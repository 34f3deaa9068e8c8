"""Algorithms that mix along a graph, of matrix W(t): in every step each replica sends z, hears h_i = sum_j W_ij(t) z_j,
and makes its next state of that.

- DSGD, adapt then combine (Lopes and Sayed 2008, doi:10.1109/TSP.2008.917383): z = step(x, g), x <- h
- D-PSGD (Lian et al., arXiv:1705.09056, algorithm 1): z = x, sent before there is a gradient; x <- h + step(x, g) - x
- DmSGD (Yu et al., arXiv:1905.03817): v = B u + g, z = (x - r v, v), (x, u) <- h
- quasi-global momentum (Lin et al., arXiv:2102.04761, algorithm 1): z = x - r (B m + g), and x <- h,
  m <- B m + (1 - B) (x - h) / r

Two end at the optimum whatever each replica's own is, with a constant step r:

- gradient tracking (DIGing; Nedic, Olshevsky and Shi, arXiv:1607.03218):
  y_i(t) = sum_j W_ij y_j(t-1) + g_i(t) - g_i(t-1), from y(0) = g(0);  x_i <- sum_j W_ij x_j - r y_i.
  The mean of all y is the mean of all g: what is tracked.
- exact diffusion (Yuan et al., arXiv:1702.05122; D2, Tang et al., arXiv:1803.07068), with V = (I + W) / 2:
  p_i(t) = x_i(t) - r g_i(t);  x_i <- sum_j V_ij (p_j(t) + x_j(t) - p_j(t-1)), at first sum_j V_ij p_j
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from meshmark.algorithms.contract import Replicas, Tensors, UpdateRule, combined, mixed
from meshmark.algorithms.decentralised import Decentralised
from meshmark.algorithms.decentralised.graph import Matrix, lazy
from meshmark.spec.workload import Workload


class DecentralisedTransition(Replicas):
    """DSGD, and what the others change of it."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule]) -> None:
        super().__init__(rules)
        self.graph, self.optimizer = cast(Decentralised, workload.algorithm).graph, workload.optimizer

    def matrix(self) -> Matrix:
        """Return the matrix of the next step."""
        return self.graph.matrix(len(self.rules), self.steps)

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        """z, by replica; of several vectors by `both`."""
        return self.alone(parameters, gradients)

    def mix(self, sent: Sequence[Tensors]) -> list[Tensors]:
        """h, by replica."""
        return mixed(self.matrix(), sent)

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        """The next states."""
        return list(heard)

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        after = self.arrive(parameters, gradients, self.mix(self.sent(parameters, gradients)))
        self.steps += 1
        return after

    def moved(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], start: Sequence[Tensors]
    ) -> list[Tensors]:
        """From `start`, by as much as each replica's own step would move its `parameters`."""
        steps = zip(start, self.alone(parameters, gradients), parameters, strict=True)
        return [combined((1, there), (1, after), (-1, here)) for there, after, here in steps]


_SECOND = "mixed/"


def both(first: Tensors, second: Tensors) -> Tensors:
    """As one message."""
    return {**first, **{_SECOND + name: x for name, x in second.items()}}


def parted(replicas: Sequence[Tensors]) -> tuple[list[Tensors], list[Tensors]]:
    """The two again."""
    first: list[Tensors] = [{n: x for n, x in tensors.items() if not n.startswith(_SECOND)} for tensors in replicas]
    second: list[Tensors] = [
        {n.removeprefix(_SECOND): x for n, x in t.items() if n.startswith(_SECOND)} for t in replicas
    ]
    return first, second


class ParallelTransition(DecentralisedTransition):
    """D-PSGD."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return list(parameters)

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        return self.moved(parameters, gradients, heard)


class WithMomentum(DecentralisedTransition):
    """The rules are of plain SGD: the momentum is what they are given as a gradient."""

    momenta: list[Tensors] | None = None

    def ahead(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        if not self.momenta:
            return list(gradients)
        pairs = zip(self.momenta, gradients, strict=True)
        return [combined((1, g), (self.optimizer.momentum, m)) for m, g in pairs]


class MixedMomentumTransition(WithMomentum):
    """DmSGD."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        own = self.ahead(gradients)
        return [both(x, v) for x, v in zip(self.alone(parameters, own), own, strict=True)]

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        after, self.momenta = parted(heard)
        return after


class QuasiGlobalTransition(WithMomentum):
    """QG-DSGDm."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return self.alone(parameters, self.ahead(gradients))

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        self.update_momenta(parameters, heard)
        return list(heard)

    def update_momenta(self, parameters: Sequence[Tensors], after: Sequence[Tensors]) -> None:
        beta = self.optimizer.momentum
        share = (1 - beta) / self.optimizer.learning_rate
        moved = [combined((share, x), (-share, there)) for x, there in zip(parameters, after, strict=True)]
        if self.momenta:
            moved = [combined((beta, m), (1, d)) for m, d in zip(self.momenta, moved, strict=True)]
        self.momenta = moved


class GradientTrackingTransition(DecentralisedTransition):
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


class ExactDiffusionTransition(DecentralisedTransition):
    alone_before: list[Tensors] | None = None

    def matrix(self) -> Matrix:
        return lazy(super().matrix())

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        now, before = self.alone(parameters, gradients), self.alone_before
        self.alone_before = now
        if before is None:
            return now
        return [combined((1, p), (1, x), (-1, q)) for p, x, q in zip(now, parameters, before, strict=True)]
