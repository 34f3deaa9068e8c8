"""The arithmetic of a training step."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """The arithmetic of a training step; `mixed` recipes keep fp32 master weights and optimizer states."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    """Mixed: bf16 matrix products, fp32 master weights."""
    FP16 = "fp16"
    """Mixed: fp16 matrix products with dynamic loss scaling, fp32 master weights."""

    @property
    def mantissa_bits(self) -> int:
        """Bits of the significand's fraction in the precision that the matrix products run in."""
        return {"fp64": 52, "fp32": 23, "bf16": 7, "fp16": 10}[self]
