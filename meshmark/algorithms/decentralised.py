"""Algorithms that mix along a graph, of matrix W(t): in every step each replica sends z, hears h_i = sum_j W_ij(t) z_j,
and makes its next state of that.

- DSGD, adapt then combine (Lopes and Sayed 2008, doi:10.1109/TSP.2008.917383): z = step(x, g), x <- h
- D-PSGD (Lian et al., arXiv:1705.09056, algorithm 1): z = x, sent before there is a gradient; x <- h + step(x, g) - x
- DmSGD (Yu et al., arXiv:1905.03817): v = B u + g, z = (x - r v, v), (x, u) <- h
- quasi-global momentum (Lin et al., arXiv:2102.04761, algorithm 1): z = x - r (B m + g), and x <- h,
  m <- B m + (1 - B) (x - h) / r
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.algorithms.replicas import Replicas, Tensors, UpdateRule, combined, mixed
from meshmark.spec.graph import Matrix
from meshmark.spec.workload import Workload


class Decentralised(Replicas):
    """DSGD, and what the others change of it."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule]) -> None:
        super().__init__(rules)
        graph = workload.algorithm.graph
        assert graph is not None, f"{workload.algorithm.kind} mixes along a graph"
        self.graph, self.optimizer = graph, workload.optimizer

    def matrix(self) -> Matrix:
        """Of the next step."""
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


class ParallelSGD(Decentralised):
    """D-PSGD."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return list(parameters)

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        return self.moved(parameters, gradients, heard)


class WithMomentum(Decentralised):
    """The rules are of plain SGD: the momentum is what they are given as a gradient."""

    momenta: list[Tensors] | None = None

    def ahead(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        if not self.momenta:
            return list(gradients)
        pairs = zip(self.momenta, gradients, strict=True)
        return [combined((1, g), (self.optimizer.momentum, m)) for m, g in pairs]


class MixedMomentum(WithMomentum):
    """DmSGD."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        own = self.ahead(gradients)
        return [both(x, v) for x, v in zip(self.alone(parameters, own), own, strict=True)]

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        after, self.momenta = parted(heard)
        return after


class QuasiGlobal(WithMomentum):
    """QG-DSGDm."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return self.alone(parameters, self.ahead(gradients))

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        self.follow(parameters, heard)
        return list(heard)

    def follow(self, parameters: Sequence[Tensors], after: Sequence[Tensors]) -> None:
        beta = self.optimizer.momentum
        share = (1 - beta) / self.optimizer.learning_rate
        moved = [combined((share, x), (-share, there)) for x, there in zip(parameters, after, strict=True)]
        if self.momenta:
            moved = [combined((beta, m), (1, d)) for m, d in zip(self.momenta, moved, strict=True)]
        self.momenta = moved
