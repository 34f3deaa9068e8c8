"""What one step makes of the states of all replicas, exact in float64: the algorithm by which they train together.

A state is a replica's parameters, where the run is, and its optimizer's states, made of the gradients that the run
itself reported. So a step is judged from where the run is under any algorithm, and nothing accumulates.

Local SGD: replica r of n minimises n times its share of the global loss, the sum of its rows' losses over the *global*
number of unmasked tokens. That is what a data-parallel engine differentiates, and so what PyTorch's optimizer sees. The
mean over replicas is the global loss, whatever the number of tokens on each: warm-up steps are synchronous training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshmark.judge.deviation import Tensors
from meshmark.reference.data import Batch
from meshmark.spec.algorithm import AlgorithmKind, AlgorithmSpec


class UpdateRule(Protocol):
    """One replica's optimizer in float64, its states made of the gradients that it has been given."""

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors: ...


class Algorithm(Protocol):
    """Over all replicas, by index."""

    def part(self, batch: Batch, replica: int) -> Batch:
        """What of a global batch `replica` trains on."""

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        """The gradients that each replica steps on and reports, of those of their parts' shares in the global loss."""

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        """What one step, the next, makes of `parameters` by the gradients that each replica stepped on."""


class Synchronous:
    """All ranks hold one state: the whole batch's gradient, one update."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule

    def part(self, batch: Batch, replica: int) -> Batch:
        return batch

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        return list(own)

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return [self.rule.step(here, own) for here, own in zip(parameters, gradients, strict=True)]


class LocalSGD:
    """Each replica steps alone; after every `period`-th step, all stand at the mean of where they have come to.

    After that each replica must be there up to rounding. Not bit for bit: which bits a mean has is a matter of its
    order, and the next step is judged from where each replica then is.
    """

    def __init__(self, spec: AlgorithmSpec, rules: Sequence[UpdateRule]) -> None:
        """`rules`: one a replica."""
        self.spec, self.rules = spec, rules
        self.steps = 0

    def part(self, batch: Batch, replica: int) -> Batch:
        return batch.shard(replica, len(self.rules))

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        whole: list[Tensors] = [{name: len(own) * g for name, g in gradients.items()} for gradients in own]
        return averaged(whole) if self.spec.reduces_gradients(self.steps) else whole

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        states = zip(self.rules, parameters, gradients, strict=True)
        after = [rule.step(here, own) for rule, here, own in states]
        averages = self.spec.averages_after(self.steps)
        self.steps += 1
        return averaged(after) if averages else after


def averaged(replicas: Sequence[Tensors]) -> list[Tensors]:
    """For every replica, the mean over all."""
    mean = {name: np.mean([tensors[name] for tensors in replicas], axis=0) for name in replicas[0]}
    return [dict(mean) for _ in replicas]


def build_algorithm(spec: AlgorithmSpec, rules: Sequence[UpdateRule]) -> Algorithm:
    """The algorithm of `spec` over as many replicas as there are rules."""
    return LocalSGD(spec, rules) if spec.kind is AlgorithmKind.LOCAL_SGD else Synchronous(rules[0])
