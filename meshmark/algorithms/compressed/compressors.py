"""Compressors: C(x), the part of a tensor x that all replicas have after it was sent.

- top-k: x where |x| is among the k largest, of equal ones the first, and 0 elsewhere. |x - C(x)|^2 <= (1 - k/d) |x|^2
- random-k: x at k places drawn by step and tensor. The same in the mean
- sign: mean(|x|) sign(x), with sign(0) = 1. |x - C(x)|^2 = |x|^2 - |x|_1^2 / d
- QSGD (arXiv:1610.02132): |x|_2 sign(x) l / s, where l is s |x_i| / |x|_2 rounded up with the probability that its
  fraction says, by draws of step, replica and tensor. E C(x) = x, E |C(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2

Where something is decided (which elements, which sign, which level), it is decided by the bits that the replica itself
has: elements in the gradients' own format, scales as float32, in which they travel. Otherwise two right answers would
lie an element apart wherever a comparison is close.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.models.module import random_bits

Array = NDArray[np.floating]
_DRAWN_BITS = 24
"""Random bits of a draw between 0 and 1: as many as float32 represents."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The values that random numbers are a function of."""

    seed: int
    """The workload's."""
    step: int
    replica: int
    name: str
    """The parameter's."""

    def bits(self, size: int, shared: bool = False) -> NDArray[np.int64]:
        """`shared` by all replicas."""
        whose = "all" if shared else str(self.replica)
        drawn: NDArray[np.int64] = random_bits(
            f"compressor/{self.step}/{whose}/{self.name}", (size,), seed=self.seed
        ).numpy()
        return drawn

    def uniform(self, size: int) -> Array:
        """Between 0 and 1, without 1."""
        found: Array = ((self.bits(size) & (2**_DRAWN_BITS - 1)) / 2**_DRAWN_BITS).astype(np.float32)
        return found


def compressed(compressor: Compressor, x: Array, draw: Draw) -> Array:
    flat = x.ravel()
    if compressor.kind is CompressorKind.SIGN:
        left = scale_of(flat) * signs(flat)
    elif compressor.kind is CompressorKind.QSGD:
        left = _quantized(flat, compressor.levels, draw)
    else:
        left = _sparse(flat, compressor, draw)
    return left.astype(x.dtype).reshape(x.shape)


def signs(x: Array) -> Array:
    """Return the signs, one bit each. The sign of zero is plus."""
    return np.where(x >= 0, x.dtype.type(1), x.dtype.type(-1))


def scale_of(x: Array) -> np.floating:
    """The mean magnitude as it travels, in the format of `x`."""
    scale: np.floating = x.dtype.type(np.float32(np.abs(x).mean(dtype=np.float64)))
    return scale


def _sparse(x: Array, compressor: Compressor, draw: Draw) -> Array:
    size = compressor.kept(len(x))
    if compressor.kind is CompressorKind.TOP_K:
        chosen = np.argsort(-np.abs(x), kind="stable")[:size]
    else:
        chosen = np.argsort(draw.bits(len(x), shared=True), kind="stable")[:size]
    left = np.zeros_like(x)
    left[chosen] = x[chosen]
    return left


def _quantized(x: Array, levels: int, draw: Draw) -> Array:
    norm = x.dtype.type(np.float32(np.sqrt(np.square(x, dtype=np.float64).sum())))
    if not norm:
        return np.zeros_like(x)
    places = np.abs(x) / norm * x.dtype.type(levels)
    below = np.floor(places)
    level = np.minimum(below + (draw.uniform(len(x)) < places - below), x.dtype.type(levels))
    quantized: Array = np.copysign(level, x) * (norm / x.dtype.type(levels))
    return quantized
