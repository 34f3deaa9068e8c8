"""Interfaces of an algorithm: transitions, gradient rules, and ways to get them wrong.

What all transitions share: replica r of n minimises n times its share of the global loss: the sum of its rows'
losses over the *global* number of unmasked tokens. That is what a data-parallel engine differentiates, and so what
PyTorch's optimizer sees. The mean over replicas is the global loss, whatever the number of tokens on each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from meshmark.spec.workload import Workload

if TYPE_CHECKING:  # torch takes seconds to import, and an algorithm's options are read without it
    from meshmark.reference.data import Batch

# --- Interfaces of an algorithm: transitions, gradient rules, and ways to get them wrong.

Tensors = Mapping[str, NDArray[np.floating]]
"""Full tensors by canonical name, in host memory outside PyTorch's allocator (which is being watched)."""
ServerVersions = Sequence[int | None]
"""Versions at one step of one replica: the version that its push made, and the version that its fetch returned."""


class UpdateRule(Protocol):
    """Optimizer of one replica. Its moments are built from the gradients that it has been given."""

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """Return the parameters after one step on `gradients`."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """Reports of the replicas of a run. Every field is by replica, then by step."""

    parameters: Sequence[Sequence[Tensors]]
    """Before each step, and after the last."""
    gradients: Sequence[Sequence[Tensors]]
    server_versions: Sequence[Sequence[ServerVersions | None]] = ()
    """Versions of a parameter server, or None for steps without one."""
    failed_step: int = 0
    """The first step at which something is wrong; 0 where that is not known yet."""


class Transition(Protocol):
    """A run of an algorithm, step by step: from the states of all replicas to their next states.

    A state is a replica's parameters, with the values that the run has reached, and whatever else the algorithm keeps.
    The latter is computed from the gradients that the run itself reported. So each step is judged from where the run
    is.
    """

    def part(self, batch: Batch, replica: int) -> Batch:
        """Return the part of a global batch that `replica` trains on."""

    def reported(self, local: Sequence[Tensors]) -> list[Tensors]:
        """Return the gradients that each replica reports, given the gradients of its part's share in the loss."""

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        """Return the parameters after the next step, given those before it and the gradients reported."""

    def stepped_on(self, gradients: Sequence[Tensors]) -> Sequence[Tensors]:
        """Return what each replica's optimizer was given in the last transition, which was of `gradients`."""

    def follow(self, run: ObservedRun) -> None:
        """Take from a run what the algorithm leaves to chance, such as the order in which a server is reached."""

    def randomize(self, run: int, seed: int) -> None:
        """Draw what the algorithm leaves to chance, for noise run number `run`."""

    def server_versions(self, step: int) -> Sequence[ServerVersions | None]:
        """Return what each replica would report of a parameter server in `step`; empty without one."""


Compute = Callable[[Tensors, "Batch", Tensors | None], tuple[float, Tensors]]
"""From weights and a part of a batch to its share of the loss and that share's gradients. The third argument replaces
the weights between the forward and the backward pass; None leaves them."""


@dataclass(frozen=True, kw_only=True)
class PipelinedStep:
    """Result of a step of a pipeline that computes gradients of older weights."""

    loss: float
    gradients: Tensors
    """Sum over all micro-batches."""
    after: Tensors | None
    """Parameters after the updates that micro-batches make by themselves; None where the step makes one update."""


class GradientRule(Protocol):
    """A run of a pipeline that computes gradients of older weights, step by step."""

    def step(self, history: Sequence[Tensors], batch: Batch, compute: Compute) -> PipelinedStep:
        """Return the next step. `history` has the parameters before each of the last steps, and before this one."""


@dataclass(frozen=True)
class FaultHypothesis:
    """A way to get an algorithm wrong, as the transition that such a run would follow."""

    description: str
    transition: Callable[[Workload, Sequence[UpdateRule]], Transition]


@dataclass(frozen=True)
class GradientHypothesis:
    """A way to take a step's gradients at the wrong weights, as the rule that such a run would follow."""

    description: str
    rule: Callable[[], GradientRule]


# --- Base of the transitions of all algorithms.

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
