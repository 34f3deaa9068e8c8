"""Replicas that step alone, x_i <- step(x_i, g_i), and meet after every H-th step:

- local SGD (Stich, arXiv:1805.09767), post-local SGD (Lin et al., arXiv:1808.07217): x_i <- mean_j x_j
- FedAvg (McMahan et al., arXiv:1602.05629, algorithm 1), replica i with n_i of n rows, of which its loss is the mean:
  x_i <- sum_j n_j / n x_j. `client_shares` says how unequal the rows are
- DiLoCo (Douillard et al., arXiv:2311.08105, algorithm 1), where replicas last met at y: D = y - mean_j x_j,
  m <- B m + D, y <- y - r (D + B m), x_i <- y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from meshmark.algorithms.contract import Replicas, Tensors, UpdateRule, averaged, combined, mixed
from meshmark.algorithms.local_sgd import DiLoCo
from meshmark.algorithms.local_sgd.client_shares import client_shares
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from meshmark.reference.data import Batch


class LocalSGDTransition(Replicas):
    """Each replica steps alone; after every `period`-th step, all are put at the mean of where they have come to.

    After that each replica must be there up to rounding. Not bit for bit: which bits a mean has depends on the order of
    its sum, and the next step is judged from where each replica then is. Warm-up steps are synchronous training.
    """

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule]) -> None:
        super().__init__(rules)
        self.algorithm = workload.algorithm

    def meets_after(self, step: int) -> bool:
        return self.algorithm.averages_after(step)

    def reported(self, local: Sequence[Tensors]) -> list[Tensors]:
        whole = super().reported(local)
        return averaged(whole) if self.algorithm.reduces_gradients(self.steps) else whole

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        after = self.alone(parameters, gradients)
        there = self.meet(after) if self.meets_after(self.steps) else after
        self.steps += 1
        return there

    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        """Return where the replicas go on after step `self.steps`, given where each has come to alone."""
        return averaged(after)


class FedAvgTransition(LocalSGDTransition):
    """The mean of replicas' losses, weighed as their parameters are, is the global loss."""

    @property
    def shares(self) -> list[float]:
        return [float(share) for share in client_shares(len(self.rules))]

    def part(self, batch: Batch, replica: int) -> Batch:
        return client_rows(batch, replica, len(self.rules))

    def reported(self, local: Sequence[Tensors]) -> list[Tensors]:
        return [combined((1 / share, gradients)) for share, gradients in zip(self.shares, local, strict=True)]

    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        return mixed([self.shares] * len(after), after)


def client_rows(batch: Batch, replica: int, count: int) -> Batch:
    """Return the rows of `replica`, of `count` replicas under FedAvg."""
    bounds = [len(batch) * sum(client_shares(count)[:end]) for end in (replica, replica + 1)]
    assert all(bound == int(bound) for bound in bounds), "the adapter refuses parts of rows"
    return batch.rows(int(bounds[0]), int(bounds[1]))


class DiLoCoTransition(LocalSGDTransition):
    met: Tensors | None = None
    """y: where the run itself says that replicas met, before the first step since."""
    momentum: Tensors | None = None

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule]) -> None:
        super().__init__(workload, rules)
        options = cast(DiLoCo, workload.algorithm)
        self.outer_rate, self.outer_momentum = options.outer_rate, options.outer_momentum

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        if self.steps == 0 or self.meets_after(self.steps - 1):
            self.met = parameters[0]
        return super().transition(parameters, gradients)

    def meet(self, after: Sequence[Tensors]) -> list[Tensors]:
        assert self.met is not None
        drift = combined((1, self.met), (-1, averaged(after)[0]))
        self.momentum = self.next_momentum(drift)
        rate = self.outer_rate
        there = combined((1, self.met), (-rate, drift), (-rate * self.outer_momentum, self.momentum))
        return [there for _ in after]

    def next_momentum(self, drift: Tensors) -> Tensors:
        if self.momentum is None:
            return drift
        return combined((self.outer_momentum, self.momentum), (1, drift))
