"""Interfaces of an algorithm: transitions, gradient rules, and ways to get them wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshmark.reference.data import Batch
from meshmark.spec.workload import Workload

Tensors = Mapping[str, NDArray[np.floating]]
"""Tensors by canonical name."""
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


Compute = Callable[[Tensors, Batch, Tensors | None], tuple[float, Tensors]]
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
