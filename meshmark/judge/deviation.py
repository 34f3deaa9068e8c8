"""Deviations of a run from the truth, and of replicas from one another, as values without torch.

Replicas may differ by design: `by_replica` says which ranks and quantities belong to which. `Sample` is the part of a
run that is judged: all of it or, for a large model, a sample. `ObservedPath` has the values that a case's instrumented
pass computed, and that its untouched pass must also compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshmark.spec.algorithm import Algorithm
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.precision import LossScaling

if TYPE_CHECKING:
    from meshmark.algorithms.contract import Tensors  # which needs torch, and readers of records have none

# --- Deviations of a run from the truth, and of replicas from one another, as values without torch.


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One quantity y of a run at one step compared with the truth x.

    Norms are L2 over the whole tensor, in float64.
    """

    distance: float
    """||y - x||. Infinite if y is missing or not finite."""
    scale: float
    """||x||."""
    factor: float
    """<y, x> / ||x||^2, so y is about this multiple of the truth."""


class QuantityKind(StrEnum):
    """The quantities of a run that are compared."""

    LOSS = "loss"
    EVALUATION = "evaluation"
    """The loss in evaluation."""
    NORM = "norm"
    """Norm of all gradients, as the framework reports it."""
    INITIAL = "initial"
    """Initial value of a parameter or buffer. Has only one step."""
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    """Buffers of the replica that is furthest from its truth."""
    SCALE = "scale"
    """Scale of a gradient: the multiple of the truth that it is."""
    TWIN = "twin"
    """Distance of a gradient from the twin's."""
    TWIN_SCALE = "twin-scale"
    """Scale of a gradient: the multiple of the twin's that it is."""
    TWIN_LOSS = "twin-loss"
    """Distance of the loss from the twin's."""
    REFERENCE = "reference"
    """Distance of the twin's gradient from the truth."""
    # Only in noise runs: distances from the twin of engines that compute in other ways. They apply to gradients and,
    # as the quantity without a name, to the loss. `judge.equivalents` defines the ways.
    REORDERED = "reordered"
    """Rows are in another order within every micro-batch."""
    REGROUPED = "regrouped"
    """There are more or fewer micro-batches, with other rows."""
    SUMS = "sums"
    """Products of the backward pass add up in another order."""
    SPLIT = "split"
    """Products are also in parts, each of some outputs, so that their input's gradient is rounded once a part."""
    PRODUCTS = "products"
    """Products are also fused, so that gradients between layers are rounded once and not three times."""
    FORWARD = "forward"
    """Attention and products also round differently in the forward pass."""
    CAST_REORDERED = "cast-reordered"
    """As `REORDERED`, for engines that cast the weights."""
    CAST_SUMS = "cast-sums"
    CAST_SPLIT = "cast-split"
    CAST_PRODUCTS = "cast-products"
    CAST_FORWARD = "cast-forward"

    def of(self, name: str = "") -> Quantity:
        """Return this kind's quantity for the parameter or buffer called `name`. Numbers of the whole model have no
        name.
        """
        return Quantity(kind=self, name=name)


_OF_ONE_REPLICA = re.compile(r"replica(?P<replica>0|[1-9]\d*)(:(?P<name>.+))?")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity that is compared at every step. Ordered by its text."""

    kind: QuantityKind
    name: str = ""
    """Name of the parameter or buffer."""
    replica: int | None = None
    """Index of the replica, if replicas may differ by design."""

    @property
    def subject(self) -> str:
        """Subject of the quantity as written in reports: `NAME`, `replica1:NAME`, `replica1`, or nothing."""
        whose = "" if self.replica is None else f"replica{self.replica}"
        return ":".join(part for part in (whose, self.name) if part)

    def __str__(self) -> str:
        return f"{self.kind}/{self.subject}" if self.subject else str(self.kind)

    def __lt__(self, other: Quantity) -> bool:
        return str(self) < str(other)

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """Return the quantity written as `text`. Raises `ValueError` if it is not valid."""
        kind, _, subject = text.partition("/")
        if of_one := _OF_ONE_REPLICA.fullmatch(subject):
            return cls(kind=QuantityKind(kind), name=of_one["name"] or "", replica=int(of_one["replica"]))
        return cls(kind=QuantityKind(kind), name=subject)


Deviations = Mapping[Quantity, list[Deviation]]
"""Deviations by quantity, then step."""


def global_norm(tensors: Tensors) -> float:
    """Return the L2 norm over all tensors together, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(t, dtype=np.float64)) for t in tensors.values())))


def deviation(y: NDArray[np.floating] | None, x: NDArray[np.floating]) -> Deviation:
    """Return the deviation of `y` from `x`. None for `y` means missing."""
    exact = np.asarray(x, dtype=np.float64)
    scale = float(np.linalg.norm(exact))
    if y is None:
        return Deviation(distance=float("inf"), scale=scale, factor=0.0)
    own = np.asarray(y, dtype=np.float64)
    distance = float(np.linalg.norm(own - exact))
    return Deviation(
        distance=distance if np.isfinite(distance) else float("inf"),
        scale=scale,
        factor=float(np.sum(own * exact)) / scale**2 if scale else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Ranks that should hold the same tensor, bit for bit, and do not."""

    quantity: Quantity
    """A parameter, or its gradient."""
    step: int
    ranks: list[int]
    """Ranks that differ from what most hold. If two values are as frequent, that of the lowest rank counts as most."""
    others: list[int] = field(default_factory=list)
    """The other ranks that hold it."""
    unchanged: bool = False
    """Whether all of `ranks` hold what they held a step before, bit for bit."""


# --- Replicas that may differ by design: which ranks and quantities belong to which replica.

T = TypeVar("T")


def replica_of(layout: Layout, rank: int) -> int:
    """Return the data-parallel replica of `rank`. The ranks of one replica hold one state."""
    return layout.coordinates(rank).dp


def num_replicas(case: Case) -> int:
    """Return the number of replicas with distinct states. It is one if all must hold the same."""
    return case.layout.dp if case.workload.algorithm.replicas_differ else 1


def replicas_of_ranks(case: Case) -> list[int]:
    """Return the replica of each rank."""
    return [replica_of(case.layout, r) if num_replicas(case) > 1 else 0 for r in range(case.world_size)]


def by_replica(values: Mapping[Quantity, T], num_replicas: int) -> list[dict[Quantity, T]]:
    """Split values by replica. Their quantities then have no replica, as if there were only one."""
    if num_replicas == 1:
        return [dict(values)]
    return [{replace(q, replica=None): v for q, v in values.items() if q.replica == r} for r in range(num_replicas)]


# --- The part of a run that is judged: all of it or, for a large model, a sample.


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


LARGEST_OWN = 50_000_000
"""The same for a user's own model, which cannot be judged by a sample: up to 4 GB."""


def assess_of(case: Case, asked: Assess | None) -> Assess:
    """Return how to judge a case: as `asked`, or by default depending on the size of its model.

    A case that cannot be sampled is judged in full if it is small enough.
    """
    own = isinstance(case.workload.model, OwnModelConfig)
    small = case.workload.model.num_parameters <= (LARGEST_OWN if own else LARGEST_FULL)
    if own and small and asked is None:
        return Assess.FULL
    chosen = asked or (Assess.FULL if small else Assess.SAMPLED)
    if chosen is Assess.SAMPLED and unsampled(case):
        return Assess.FULL if small else Assess.OFF
    return chosen


def unsampled(case: Case) -> str | None:
    """Why `case` cannot be judged by a sample; None when it can."""
    if isinstance(case.workload.model, OwnModelConfig):
        return (
            "layers of a model of your own cannot be computed one by one; --assess full judges it whole, where memory "
            "has room for some 80 bytes a parameter"
        )
    if case.workload.couples_rows:
        return "its rows are normalised together, so that its gradients cannot be computed layer by layer"
    if num_replicas(case) > 1:
        return "its replicas may differ, and their states are judged together"
    return None


def sample_of(case: Case) -> Sample:
    """Return the sample of `case`.

    Under dynamic loss scaling it also includes the metered step: a skipped step is recognised by its gradients, and
    tried again.
    """
    return Sample(steps=3) if case.precision.loss_scaling is LossScaling.DYNAMIC else Sample()


# --- The values that a case's instrumented pass computed, and that its untouched pass must also compute.


@dataclass(frozen=True, kw_only=True)
class ObservedPath:
    """The values that the instrumented pass computed, and that the untouched pass must also compute."""

    losses: list[float]
    """Losses by step, up to the last timed step: of judged steps, and of later steps by the same calls."""
    digests: list[str]
    """A hash of every parameter's bits before the first step and after each judged step."""
    later: dict[int, str] = field(default_factory=dict)
    """The same hashes after more steps than these, by steps done."""
    left_out: int = 0
    """Number of steps that loss scaling skipped, among as many first steps as are judged."""
    repeats: bool | None = None
    """True if another such pass computed the same bits. None if that was not needed."""

    def digest(self, done: int) -> str | None:
        """Return the hash after `done` steps, or None if there is none."""
        return self.digests[done] if done < len(self.digests) else self.later.get(done)

    @property
    def num_judged(self) -> int:
        """Number of judged steps."""
        return len(self.digests) - 1

    def is_left_to_tolerance(self, algorithm: Algorithm) -> bool:
        """Return whether an untouched pass that computed other bits is judged by the tolerance model of losses.

        This is so if two passes of the engine differed. It is also so under a parameter server, where the order of
        replicas is random, so that two equal passes prove nothing.
        """
        return self.repeats is False or (self.repeats is not None and algorithm.steps_until_chance is not None)

    def differences(self, losses: list[float], digests: dict[int, str]) -> list[str]:
        """Return where an untouched pass computed other bits. `digests` is by steps done."""
        judged = "where it was judged", "where the calls that were judged went on"
        found = [
            f"the loss of step {step} is {own!r}, and {other!r} {judged[step >= self.num_judged]}"
            for step, (own, other) in enumerate(zip(losses, self.losses, strict=False))
            if own != other
        ]
        return found + [
            f"the parameters after {done} steps are others than {judged[done > self.num_judged]}"
            for done, own in digests.items()
            if self.digest(done) not in (None, own)
        ]


# --- A fingerprint of the truth, by which processes are compared.


@dataclass(frozen=True, kw_only=True)
class TensorPrint:
    """A tensor in two numbers. Two tensors with different elements have different ones, almost surely."""

    norm: float
    projection: float
    """Inner product with a tensor of random numbers in [-1, 1]."""

    def differs(self, other: TensorPrint, room: float) -> bool:
        """Return whether it differs from `other` by more than rounding and `room`."""
        allowed = _SAME_TENSOR * max(self.norm, other.norm) + room
        off = max(abs(self.norm - other.norm), abs(self.projection - other.projection))
        return not (off <= allowed or repr(self) == repr(other))


@dataclass(frozen=True, kw_only=True)
class TruthPrint:
    """What the truth of one workload computes. Every process computes the same, up to the rounding of float64."""

    loss: float
    """Of the first batch, at values near the prescribed initial ones."""
    gradients: dict[str, TensorPrint]
    """Of the same loss."""
    updates: dict[str, TensorPrint]
    """How a few steps of the optimizer move each parameter, with random gradients that every process draws alike."""

    def difference(self, clean: TruthPrint) -> str:
        """Return how this truth differs from that of a `clean` process, in words; empty if it does not."""
        if not (math.isclose(self.loss, clean.loss, rel_tol=_SAME_TENSOR) or repr(self.loss) == repr(clean.loss)):
            return f"its loss is {self.loss:.12g} there and {clean.loss:.12g} elsewhere"
        # A gradient that is zero but for rounding is as large as the rounding of the others.
        room = _ROUNDED_ZERO * math.sqrt(sum(each.norm**2 for each in clean.gradients.values()))
        for name, there in clean.gradients.items():
            if name not in self.gradients or self.gradients[name].differs(there, room):
                return f"its gradient of {name} is another there than elsewhere"
        for name, there in clean.updates.items():
            if name not in self.updates or self.updates[name].differs(there, 0.0):
                return f"its optimizer moves {name} otherwise there than elsewhere"
        return ""


_SAME_TENSOR = 1e-9
"""Relative tolerance. Threads and kernels change the order of float64 sums: some 1e-14."""
_ROUNDED_ZERO = 1e-14
