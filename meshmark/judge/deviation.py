"""How far one quantity of a run is from the truth, and replicas from one another: values, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One quantity y of a run at one step, against the truth x. Norms are L2 over the whole tensor, in float64."""

    distance: float
    """||y - x||; infinite where y is missing or not finite."""
    scale: float
    """||x||."""
    factor: float
    """<y, x> / ||x||^2: y is about this multiple of the truth."""


class QuantityKind(StrEnum):
    """What is compared of a run."""

    LOSS = "loss"
    EVALUATION = "evaluation"
    """The loss, in evaluation."""
    NORM = "norm"
    """Of all gradients, as the framework told it."""
    INITIAL = "initial"
    """Of a parameter or buffer: its start, the only step there is of it."""
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    """Of the replica that is furthest from its truth."""
    SCALE = "scale"
    """Of a gradient: the multiple of the truth that it is."""
    TWIN = "twin"
    """Of a gradient, from the twin's."""
    TWIN_SCALE = "twin-scale"
    """Of a gradient: the multiple of the twin's that it is."""
    TWIN_LOSS = "twin-loss"
    """From the twin's."""
    REFERENCE = "reference"
    """Of the twin's gradient, from the truth."""
    # Of noise runs alone: the gradients, and as the quantity without a name the loss, of an engine that computes in
    # another way than the twin, from the twin's. Ways are told in `judge.equivalents`.
    REORDERED = "reordered"
    """Rows stand in another order within every micro-batch."""
    REGROUPED = "regrouped"
    """Micro-batches are more or fewer, of other rows."""
    SUMS = "sums"
    """Products of the backward pass add up in another order."""
    PRODUCTS = "products"
    """And are fused, so that gradients between layers are rounded once and not thrice."""
    FORWARD = "forward"
    """Attention and products round otherwise in the forward pass too."""
    CAST_REORDERED = "cast-reordered"
    """The same where the weights are cast."""
    CAST_SUMS = "cast-sums"
    CAST_PRODUCTS = "cast-products"
    CAST_FORWARD = "cast-forward"

    def of(self, name: str = "") -> Quantity:
        """That of the parameter or buffer called `name`; a number of the whole model has none."""
        return Quantity(kind=self, name=name)


_OF_ONE_REPLICA = re.compile(r"replica(?P<replica>0|[1-9]\d*)(:(?P<name>.+))?")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One thing that is compared at every step; in order as it is written."""

    kind: QuantityKind
    name: str = ""
    """The parameter's or buffer's."""
    replica: int | None = None
    """Whose it is, where replicas may differ by design."""

    @property
    def subject(self) -> str:
        """What it is of, as written: `NAME`, `replica1:NAME`, `replica1`, or nothing."""
        whose = "" if self.replica is None else f"replica{self.replica}"
        return ":".join(part for part in (whose, self.name) if part)

    def __str__(self) -> str:
        return f"{self.kind}/{self.subject}" if self.subject else str(self.kind)

    def __lt__(self, other: Quantity) -> bool:
        return str(self) < str(other)

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """The quantity that is written so. Raises `ValueError` when it is none."""
        kind, _, subject = text.partition("/")
        if of_one := _OF_ONE_REPLICA.fullmatch(subject):
            return cls(kind=QuantityKind(kind), name=of_one["name"] or "", replica=int(of_one["replica"]))
        return cls(kind=QuantityKind(kind), name=subject)


Deviations = Mapping[Quantity, list[Deviation]]
"""By quantity, then step."""


def global_norm(tensors: Tensors) -> float:
    """L2 norm over all tensors together, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(t, dtype=np.float64)) for t in tensors.values())))


def deviation(y: NDArray[np.floating] | None, x: NDArray[np.floating]) -> Deviation:
    """`y` None means missing."""
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
"""Full tensors by canonical name, in host memory that PyTorch's allocator (which is being watched) does not own."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Ranks that should hold the same tensor, bit for bit, and do not."""

    quantity: Quantity
    """A parameter, or its gradient."""
    step: int
    ranks: list[int]
    """Those that differ from the lowest rank that holds it."""
