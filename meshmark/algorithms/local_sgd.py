"""Local SGD (Stich, arXiv:1805.09767) and post-local SGD (Lin et al., arXiv:1808.07217).

x_i <- step(x_i, g_i);  after every H-th step  x_i <- mean_j x_j
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.algorithms.replicas import Replicas, Tensors, UpdateRule, averaged
from meshmark.spec.algorithm import AlgorithmSpec


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
