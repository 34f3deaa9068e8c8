"""What can be wrong with a run that fails: the classes that a diagnosis names, and the evidence it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """The likely class of a defect."""

    START = "wrong start"
    """Initial values are not the prescribed ones."""
    MISSING = "gradient missing"
    """Absent or all zero."""
    SCALED = "gradient scaled"
    """Off by a constant factor, which the detail names."""
    NOT_REDUCED = "missing reduction"
    """One rank's own part, in place of the sum over ranks."""
    DROPPED = "part of the batch left out"
    UNEVEN = "parts of the batch weighed wrongly"
    """Such as a mean of means over parts with unequal numbers of tokens."""
    MASK = "masked targets counted"
    STALE_GRADIENT = "stale gradient"
    """That of the step before."""
    NOT_CLEARED = "gradient not cleared"
    """The step before's is still in it."""
    STALE_WEIGHTS = "stale weights"
    """The gradient at the parameters of the step before."""
    OTHER_BATCH = "another step's batch"
    FORWARD = "another function computed"
    """Loss and gradients are wrong, and no weighing of the right parts explains them."""
    BACKWARD = "gradient of another function"
    """The loss is right, but no weighing of the right parts explains its gradient."""
    PRECISION = "precision lower than asked"
    DRIFT = "replicas drifted apart"
    NEVER_UPDATED = "never updated"
    CLIPPING = "clipping by a wrong norm"
    UPDATE = "another update rule"
    """Learning rate, betas, weight decay, bias correction, ...: the detail names it where one explains the update."""
    ALGORITHM = "another algorithm"
    """Replicas that may differ by design meet at another time, or otherwise, than the algorithm says."""
    BUFFERS = "running statistics wrong"
    """Of a batch norm, though loss, gradients and update are right."""
    LOSS = "loss told wrong"
    EVALUATION = "evaluation is another function"
    """Though training's loss and gradients are right."""
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The earliest thing that is wrong in a run, and what it looks like."""

    fault: Fault
    step: int
    """The first at which it shows."""
    names: list[str] = field(default_factory=list)
    """Parameters concerned at that step, the worst first; no more than MOST_NAMES."""
    num_names: int = 0
    """Parameters concerned, all of them."""
    ranks: list[int] = field(default_factory=list)
    """Where it is known to be on some ranks alone."""
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


def named_factor(factor: float, known: Mapping[str, float], tolerance: float = 1e-3) -> str:
    """`factor`, with every known quantity that it equals: `0.5 = 1/dp = 1/num_micro_batches`."""
    matching = [name for name, value in known.items() if abs(factor - value) <= tolerance * abs(value)]
    return " = ".join([f"{factor:.7g}", *matching])
