"""Deviations of a run from the truth, and of replicas from one another, as values without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


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


Tensors = Mapping[str, NDArray[np.floating]]
"""Full tensors by canonical name, in host memory outside PyTorch's allocator (which is being watched)."""


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
