"""The part of a run that is judged: all of it or, for a large model, a sample."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshmark.judge.replicas import num_replicas
from meshmark.spec.case import Case
from meshmark.spec.precision import LossScaling


class Assess(StrEnum):
    """How much of a run is held against the truth."""

    FULL = "full"
    """Every step and tensor, by a noise of 24 runs; in memory, on one core."""
    SAMPLED = "sampled"
    """Every tensor of the first steps, one by one, by a noise of fewer runs; on all cores, or the run's device."""
    OFF = "off"
    """Nothing: only memory, traffic and time are measured."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The sample that `Assess.SAMPLED` judges."""

    steps: int = 2
    """The first ones: an update's moments and bias correction show in the second."""
    noise_runs: int = 6

    def stored_bytes(self, num_parameters: int) -> int:
        """Return the bytes that one run's tensors take on disk until it is judged, in float32: the parameters before
        and after every step, and the gradients of each."""
        return 4 * num_parameters * (2 * self.steps + 1)

    @property
    def text(self) -> str:
        return f"{self.steps} steps, noise of {self.noise_runs} runs"


TIME_LIMITS = 10
"""Multiple of the usual time limit for a pass in which a large model is judged."""
OBSERVED_STEPS = 5
"""Number of steps of a run that is judged in full."""
ENDURANCE_STEPS = 50
"""Number of steps of a run that should show late faults."""
ENDURANCE_TIME = ENDURANCE_STEPS // OBSERVED_STEPS
"""Time limits that such a run has."""
LARGEST_FULL = 20_000_000
"""Parameters of the largest model that is judged whole unless asked otherwise: of all steps at once it takes some 80
bytes a parameter on one rank."""


def assess_of(case: Case, asked: Assess | None) -> Assess:
    """Return how to judge a case: as `asked`, or by default depending on the size of its model.

    A case that cannot be sampled is judged in full if it is small enough.
    """
    small = case.workload.model.num_parameters <= LARGEST_FULL
    chosen = asked or (Assess.FULL if small else Assess.SAMPLED)
    if chosen is Assess.SAMPLED and unsampled(case):
        return Assess.FULL if small else Assess.OFF
    return chosen


def unsampled(case: Case) -> str | None:
    """Why `case` cannot be judged by a sample; None when it can."""
    if case.workload.couples_rows:
        return "its rows are normalised together, so that its gradients cannot be computed layer by layer"
    if num_replicas(case) > 1:
        return "its replicas may differ, and their states are judged together"
    return None


def sample_of(case: Case) -> Sample:
    """A step that loss scaling leaves out is known by its gradients, and tried again: there the metered one is judged
    too."""
    return Sample(steps=3) if case.precision.loss_scaling is LossScaling.DYNAMIC else Sample()
