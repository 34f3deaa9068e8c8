"""Base of the transitions of all algorithms.

Replica r of n minimises n times its share of the global loss: the sum of its rows' losses over the *global* number of
unmasked tokens. That is what a data-parallel engine differentiates, and so what PyTorch's optimizer sees. The mean
over replicas is the global loss, whatever the number of tokens on each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.contract import ObservedRun, ServerVersions, Tensors, UpdateRule
from meshmark.reference.data import Batch

SAME = 1e-5
"""Numbers that differ by less, relative to the largest, are one number."""
LEFT_OVER = 0.05
"""Part of a deviation that a hypothesis may leave unexplained."""


class LeavesNothingToChance:
    """The part of `Transition` for algorithms whose every step is determined."""

    def follow(self, run: ObservedRun) -> None:
        pass

    def randomize(self, run: int, seed: int) -> None:
        pass

    def server_versions(self, step: int) -> Sequence[ServerVersions | None]:
        return []


class Synchronous(LeavesNothingToChance):
    """Synchronous training: all ranks hold one state, and step on the gradient of the whole batch."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule

    def part(self, batch: Batch, replica: int) -> Batch:
        return batch

    def reported(self, local: Sequence[Tensors]) -> list[Tensors]:
        return list(local)

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return [self.rule.step(here, own) for here, own in zip(parameters, gradients, strict=True)]

    def stepped_on(self, gradients: Sequence[Tensors]) -> Sequence[Tensors]:
        return gradients


class Replicas(LeavesNothingToChance):
    """Replicas that each train on a part of the batch, with an optimizer of their own."""

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        """`rules` has one optimizer for each replica."""
        self.rules = rules
        self.steps = 0
        """Number of steps done so far."""

    def part(self, batch: Batch, replica: int) -> Batch:
        return batch.shard(replica, len(self.rules))

    def reported(self, local: Sequence[Tensors]) -> list[Tensors]:
        return [{name: len(local) * g for name, g in gradients.items()} for gradients in local]

    def stepped_on(self, gradients: Sequence[Tensors]) -> Sequence[Tensors]:
        return gradients

    def alone(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        """Return where each replica comes by its own optimizer."""
        states = zip(self.rules, parameters, gradients, strict=True)
        return [rule.step(here, own) for rule, here, own in states]


def averaged(replicas: Sequence[Tensors]) -> list[Tensors]:
    """Return the mean over all replicas, once for each of them."""
    mean = {name: np.mean([tensors[name] for tensors in replicas], axis=0) for name in replicas[0]}
    return [dict(mean) for _ in replicas]


def combined(*terms: tuple[float, Tensors]) -> Tensors:
    """Return the sum of factor times tensors, in the precision of the tensors."""
    names = terms[0][1]
    factors = [(a, tensors) for a, tensors in terms if a]
    return {name: functools.reduce(np.add, [_typed(a, t[name]) * t[name] for a, t in factors]) for name in names}


def mixed(weights: Sequence[Sequence[float]], replicas: Sequence[Tensors]) -> list[Tensors]:
    """Return, for every replica, the sum over all replicas of its row's weight times their tensors."""
    return [combined(*zip(row, replicas, strict=True)) for row in weights]


def _typed(factor: float, like: NDArray[np.floating]) -> np.floating:
    number: np.floating = like.dtype.type(factor)
    return number


def flat(tensors: Tensors, names: Sequence[str]) -> NDArray[np.float64]:
    """Return the named tensors as one vector, in float64."""
    return np.concatenate([np.asarray(tensors[name], dtype=np.float64).ravel() for name in names])


def listed(weights: Sequence[float]) -> str:
    """Return weights as text; what is only rounding beside the largest is shown as 0."""
    largest = max(abs(weight) for weight in weights)
    return ", ".join(f"{weight if abs(weight) > SAME * largest else 0:.4g}" for weight in weights)
