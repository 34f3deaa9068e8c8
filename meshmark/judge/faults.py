"""Classes of defects that a diagnosis names, and its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """The likely class of a defect."""

    START = "wrong start"
    """Initial values are not the prescribed ones."""
    MISSING = "gradient missing"
    """A gradient is absent or all zero."""
    SCALED = "gradient scaled"
    """Gradients are off by a constant factor, which the detail names."""
    NOT_REDUCED = "missing reduction"
    """Gradients are one rank's own part instead of the sum over ranks."""
    OTHER_REDUCTION = "reduced by another operation"
    """Gradients are, for example, the maximum over ranks instead of the sum."""
    DROPPED = "part of the batch left out"
    UNEVEN = "parts of the batch weighed wrongly"
    """For example, a mean of means over parts with unequal numbers of tokens."""
    MASK = "masked targets counted"
    STALE_GRADIENT = "stale gradient"
    """The gradient is that of the previous step."""
    NOT_CLEARED = "gradient not cleared"
    """The gradient still includes that of the previous step."""
    STALE_WEIGHTS = "stale weights"
    """The gradient is at the parameters of the previous step."""
    STALE_ACTIVATIONS = "stale activations"
    """A block computes with what passed to it in the previous step."""
    OTHER_BATCH = "another step's batch"
    FORWARD = "another function computed"
    """Loss and gradients are wrong, and no weighting of the right parts explains them."""
    BACKWARD = "gradient of another function"
    """The loss is right, but no weighting of the right parts explains its gradient."""
    VARIANT = "variant of a function"
    """Loss and gradients are those of the model with a module that computes a little else. The detail names it."""
    OBJECTIVE = "gradient of another loss"
    """Gradients are those of the loss with one more term. The detail names it."""
    PRECISION = "precision lower than asked"
    LOSS_SCALE = "loss scale forgotten"
    """Loss scaling begins a step with a scale that is known to overflow, and skips batches until it has lowered it."""
    DRIFT = "replicas drifted apart"
    NEVER_UPDATED = "never updated"
    CLIPPING = "clipping by a wrong norm"
    MISPLACED = "right values in wrong places"
    """For example, shards of a tensor that are put together in another order."""
    UPDATE = "another update rule"
    """Learning rate, betas, weight decay, bias correction, ... The detail names it if one explains the update."""
    ALGORITHM = "another algorithm"
    """Replicas that may differ by design exchange values at another time, or in another way, than the algorithm
    defines.
    """
    BUFFERS = "running statistics wrong"
    """Statistics of a batch norm are wrong although loss, gradients and update are right."""
    LOSS = "loss told wrong"
    EVALUATION = "evaluation loss wrong"
    """The loss of an evaluation is wrong although training's loss and gradients are right."""
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The earliest defect of a run, and its symptoms."""

    fault: Fault
    step: int
    """The first step at which it shows."""
    names: list[str] = field(default_factory=list)
    """Affected parameters at that step, the worst first, at most MOST_NAMES."""
    num_names: int = 0
    """Number of all affected parameters."""
    ranks: list[int] = field(default_factory=list)
    """Affected ranks, if it is known to affect only some."""
    detail: str = ""
    """The evidence."""

    @property
    def text(self) -> str:
        where = f"from step {self.step} on"
        if self.names:
            more = self.num_names - 1
            where += f", {self.names[0]}{f' and {more} more' if more else ''}"
        if self.ranks:
            where += f", on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return f"{self.fault} ({where}){f': {self.detail}' if self.detail else ''}"


MOST_NAMES = 5


_NEARER = 0.3
"""Share of a factor's distance from 1 that it may be from a quantity that names it."""


def named_factor(factor: float, known: Mapping[str, float], tolerance: float = 1e-3) -> str:
    """Return `factor` with every known quantity that it equals, such as `0.5 = 1/dp = 1/num_micro_batches`.

    A quantity must be much nearer to it than 1 is, which is right. Where several fit, the text says how to tell them
    apart.
    """
    off = _NEARER * abs(factor - 1)
    matching = [name for name, value in known.items() if abs(factor - value) <= min(tolerance * abs(value), off)]
    several = " (a layout in which these differ tells which)" if len(matching) > 1 else ""
    return " = ".join([f"{factor:.7g}", *matching]) + several
