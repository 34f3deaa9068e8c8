"""How a gradient is made smaller before it is sent, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import InputError

MOST_LEVELS = 127
"""Number of levels that a signed byte distinguishes on each side of zero."""


class CompressorKind(StrEnum):
    """Their equations stand in `meshmark.algorithms.compressors`."""

    FP16 = "fp16"
    BF16 = "bf16"
    TOP_K = "top-k"
    """The largest elements, whatever their sign; of equal ones the first."""
    RANDOM_K = "random-k"
    """Elements that are drawn anew in every step, the same on all replicas."""
    SIGN = "sign"
    """Signs, and the mean magnitude of the tensor."""
    QSGD = "qsgd"
    """Magnitudes rounded to levels at random, without bias, each replica by draws of its own."""
    POWER_SGD = "power-sgd"
    """A matrix of low rank, of all replicas' gradients together (arXiv:1905.13727)."""


SPARSE = frozenset({CompressorKind.TOP_K, CompressorKind.RANDOM_K})
CONTRACTIONS = frozenset({CompressorKind.TOP_K, CompressorKind.SIGN})
"""Those that bring every tensor nearer to zero, and know nothing of the step."""


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """Raises `InputError` for what compresses nothing."""

    kind: CompressorKind
    percent: int = 10
    """Percentage of a tensor's elements that sparse compressors send, rounded down; at least one element."""
    levels: int = 64
    """QSGD's, from zero to the tensor's norm."""
    rank: int = 1
    """PowerSGD's."""
    rounds: int = 1
    """Number of rounds of a contraction.

    Each further round compresses what the earlier ones left (arXiv:2206.03665).
    """

    def __post_init__(self) -> None:
        if not 1 <= self.percent <= 100:
            raise InputError(
                f"compressor: {self.kind} of {self.percent} percent of a tensor; expected 1 to 100, for k is at least "
                "one element and no more than there are"
            )
        if not 1 <= self.levels <= MOST_LEVELS:
            raise InputError(f"compressor: {self.levels} levels, expected 1 to {MOST_LEVELS}: they travel as bytes")
        if self.rank < 1:
            raise InputError(f"compressor: rank is {self.rank}, expected at least 1")
        if self.rounds < 1 or self.rounds > 1 and self.kind not in CONTRACTIONS:
            raise InputError(
                f"compressor: {self.rounds} rounds of {self.kind}; expected 1, or more of one of "
                f"{', '.join(sorted(CONTRACTIONS))}, which leave less and less"
            )

    @property
    def id(self) -> str:
        """`top-k10`, `qsgd64`, `power-sgd1`, `fp16`; in three rounds `signx3`."""
        told = {CompressorKind.QSGD: self.levels, CompressorKind.POWER_SGD: self.rank}
        told |= dict.fromkeys(SPARSE, self.percent)
        again = f"x{self.rounds}" if self.rounds > 1 else ""
        return f"{self.kind}{told.get(self.kind, '')}{again}"

    def kept(self, size: int) -> int:
        """Elements that a sparse one sends of a tensor of `size`."""
        return max(1, size * self.percent // 100)

    def factors(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Rows, columns and rank of what PowerSGD makes of a tensor; None where it sends the tensor itself, for that
        is less than twice as long, as PyTorch's hook has it."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], 1
        for length in shape[1:]:
            columns *= length
        rank = min(rows, columns, self.rank)
        return (rows, columns, rank) if 2 * (rows + columns) * rank < rows * columns else None
