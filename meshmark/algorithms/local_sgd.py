"""Replicas that step alone, x_i <- step(x_i, g_i), and meet after every H-th step:

- local SGD (Stich, arXiv:1805.09767), post-local SGD (Lin et al., arXiv:1808.07217): x_i <- mean_j x_j
- FedAvg (McMahan et al., arXiv:1602.05629, algorithm 1), replica i with n_i of n rows, of which its loss is the mean:
  x_i <- sum_j n_j / n x_j. Rows are so unequal as `client_shares` says
- DiLoCo (Douillard et al., arXiv:2311.08105, algorithm 1), where replicas last met at y: D = y - mean_j x_j,
  m <- B m + D, y <- y - r (D + B m), x_i <- y
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.algorithms.replicas import Replicas, Tensors, UpdateRule, averaged, combined, mixed
from meshmark.reference.data import Batch
from meshmark.spec.algorithm import AlgorithmSpec
from meshmark.spec.client_shares import client_shares


class LocalSGD(Replicas):
    """Each replica steps alone; after every `period`-th step, all stand at the mean of where they have come to.

    After that each replica must be there up to rounding. Not bit for bit: which bits a mean has is a matter of its
    order, and the next step is judged from where each replica then is. Warm-up steps are synchronous training.
    """

    def __init__(self, spec: AlgorithmSpec, rules: Sequence[UpdateRule]) -> None:
        super().__init__(rules)
        self.spec = spec

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        whole = super().reported(own)
        return averaged(whole) if self.spec.reduces_gradients(self.steps) else whole

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        after = self.alone(parameters, gradients)
        averages = self.spec.averages_after(self.steps)
        self.steps += 1
        return averaged(after) if averages else after


class FedAvg(LocalSGD):
    """The mean of replicas' losses, weighed as their parameters are, is the global loss."""

    @property
    def shares(self) -> list[float]:
        return [float(share) for share in client_shares(len(self.rules))]

    def part(self, batch: Batch, replica: int) -> Batch:
        return own_rows(batch, replica, len(self.rules))

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        return [combined((1 / share, gradients)) for share, gradients in zip(self.shares, own, strict=True)]

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        after = self.alone(parameters, gradients)
        averages = self.spec.averages_after(self.steps)
        self.steps += 1
        return self.weighed(after) if averages else after

    def weighed(self, after: Sequence[Tensors]) -> list[Tensors]:
        return mixed([self.shares] * len(after), after)


def own_rows(batch: Batch, replica: int, count: int) -> Batch:
    """Replica `replica`'s of `count`, under FedAvg."""
    bounds = [len(batch) * sum(client_shares(count)[:end]) for end in (replica, replica + 1)]
    assert all(bound == int(bound) for bound in bounds), "the adapter refuses parts of rows"
    return batch.rows(int(bounds[0]), int(bounds[1]))


class DiLoCo(LocalSGD):
    met: Tensors | None = None
    """y: where the run itself says that they met, before the first step since."""
    momentum: Tensors | None = None

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        if self.steps == 0 or self.spec.averages_after(self.steps - 1):
            self.met = parameters[0]
        after = self.alone(parameters, gradients)
        meet = self.spec.averages_after(self.steps)
        self.steps += 1
        return self.outer(after) if meet else after

    def outer(self, after: Sequence[Tensors]) -> list[Tensors]:
        assert self.met is not None
        drift = combined((1, self.met), (-1, averaged(after)[0]))
        beta, rate = self.spec.outer_momentum, self.spec.outer_rate
        self.momentum = self.gathered(drift)
        there = combined((1, self.met), (-rate, drift), (-rate * beta, self.momentum))
        return [there for _ in after]

    def gathered(self, drift: Tensors) -> Tensors:
        """The next momentum."""
        if self.momentum is None:
            return drift
        return combined((self.spec.outer_momentum, self.momentum), (1, drift))
