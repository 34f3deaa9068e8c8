"""What all algorithms share. A state is a replica's parameters, where the run is, and whatever else its algorithm
keeps, made of the gradients that the run itself reported. So a step is judged from where the run is under any
algorithm, and nothing accumulates.

Replica r of n minimises n times its share of the global loss, the sum of its rows' losses over the *global* number of
unmasked tokens. That is what a data-parallel engine differentiates, and so what PyTorch's optimizer sees. The mean over
replicas is the global loss, whatever the number of tokens on each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshmark.reference.data import Batch

Tensors = Mapping[str, NDArray[np.floating]]
"""By canonical name."""


class UpdateRule(Protocol):
    """One replica's optimizer, its states made of the gradients that it has been given."""

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors: ...


class Algorithm(Protocol):
    """Over all replicas, by index."""

    def part(self, batch: Batch, replica: int) -> Batch:
        """What of a global batch `replica` trains on."""

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        """The gradients that each replica reports, of those of their parts' shares in the global loss."""

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        """What one step, the next, makes of `parameters` by the gradients that each replica reported."""

    def stepped_on(self, gradients: Sequence[Tensors]) -> Sequence[Tensors]:
        """What each replica's optimizer was given in the last transition, which was of `gradients`."""


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

    def stepped_on(self, gradients: Sequence[Tensors]) -> Sequence[Tensors]:
        return gradients


class Replicas:
    """Each trains on its own part, with an optimizer of its own."""

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        """`rules`: one a replica."""
        self.rules = rules
        self.steps = 0
        """Done so far."""

    def part(self, batch: Batch, replica: int) -> Batch:
        return batch.shard(replica, len(self.rules))

    def reported(self, own: Sequence[Tensors]) -> list[Tensors]:
        return [{name: len(own) * g for name, g in gradients.items()} for gradients in own]

    def stepped_on(self, gradients: Sequence[Tensors]) -> Sequence[Tensors]:
        return gradients

    def alone(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        """Where each comes by its own optimizer."""
        states = zip(self.rules, parameters, gradients, strict=True)
        return [rule.step(here, own) for rule, here, own in states]


def averaged(replicas: Sequence[Tensors]) -> list[Tensors]:
    """For every replica, the mean over all."""
    mean = {name: np.mean([tensors[name] for tensors in replicas], axis=0) for name in replicas[0]}
    return [dict(mean) for _ in replicas]


def combined(*terms: tuple[float, Tensors]) -> Tensors:
    """The sum of factor times tensors, in the precision of these."""
    names = terms[0][1]
    factors = [(a, tensors) for a, tensors in terms if a]
    return {name: functools.reduce(np.add, [_typed(a, t[name]) * t[name] for a, t in factors]) for name in names}


def mixed(weights: Sequence[Sequence[float]], replicas: Sequence[Tensors]) -> list[Tensors]:
    """For every replica, the sum over all of its row's weight times their tensors."""
    return [combined(*zip(row, replicas, strict=True)) for row in weights]


def _typed(factor: float, like: NDArray[np.floating]) -> np.floating:
    number: np.floating = like.dtype.type(factor)
    return number
