"""How far one quantity of a run is from the truth, and replicas from one another: values, without torch."""

from __future__ import annotations

from dataclasses import dataclass

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


Deviations = dict[str, list[Deviation]]
"""By quantity, then step: `loss`, `evaluation`, `norm`, `gradients/NAME`, `parameters/NAME`, `buffers/NAME` (of the
replica that is furthest from its truth), and `initial/NAME` (one step)."""


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


Tensors = dict[str, NDArray[np.floating]]
"""Full tensors by canonical name, in host memory that PyTorch's allocator (which is being watched) does not own."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Ranks that should hold the same tensor, bit for bit, and do not."""

    quantity: str
    """parameters/NAME or gradients/NAME."""
    step: int
    ranks: list[int]
    """Those that differ from the lowest rank that holds it."""
