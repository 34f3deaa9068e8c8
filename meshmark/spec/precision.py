"""The arithmetic of a training step: the formats in which numbers are stored, multiplied and summed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from meshmark.errors import InputError, UnknownNameError


class Dtype(StrEnum):
    """A floating-point format, by its PyTorch name."""

    FP64 = "float64"
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[self]

    @property
    def short(self) -> str:
        """Short name, as datasheets and command lines use it."""
        return {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self]

    @property
    def mantissa_bits(self) -> int:
        """Bits of the significand's fraction."""
        return {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}[self]


NARROW = {Dtype.BF16: "bf16", Dtype.FP16: "fp16"}
"""Short names of the formats narrower than float32, as in `MemoryEvidence.state_dtypes`."""


class LossScaling(StrEnum):
    """Whether the loss is scaled before the backward pass, so that small gradients do not underflow."""

    NONE = "none"
    DYNAMIC = "dynamic"
    """The scale shrinks when a gradient overflows, and that step is skipped. It grows again later."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of a training step. Presets are class attributes, and in `PRESETS` by name.

    Raises `InputError` for a different arithmetic under the name of a preset.
    """

    PRESETS: ClassVar[dict[str, Precision]] = {}
    FP64: ClassVar[Precision]
    FP32: ClassVar[Precision]
    BF16: ClassVar[Precision]
    """Mixed: bf16 matrix products, fp32 master weights, gradients accumulated and reduced in fp32."""
    FP16: ClassVar[Precision]
    """Mixed, as `BF16`, but in fp16 and with dynamic loss scaling."""
    BF16_REDUCE_BF16: ClassVar[Precision]
    """Mixed, as `BF16`, but gradients are sent and summed over data-parallel ranks in bf16.

    This halves the bytes. The rounding of every rank's part and of the sum is expected.
    """

    name: str
    """Name that appears in the ids of cases."""
    compute: Dtype
    """Dtype of the matrix products."""
    weights: Dtype
    """Dtype of the weights that the products read and that ZeRO gathers.

    If the master weights are wider, these are a copy, made by the sharding or by autocast for each product.
    """
    accumulation: Dtype
    """Dtype in which a rank sums the gradients of its micro-batches."""
    reduction: Dtype
    """Dtype in which gradients are sent and summed over data-parallel ranks."""
    master: Dtype
    """Dtype of the weights that the optimizer updates."""
    states: Dtype
    """Dtype of the optimizer's moments."""
    loss_scaling: LossScaling = LossScaling.NONE

    def __post_init__(self) -> None:
        if self.PRESETS.get(self.name, self) != self:
            raise InputError(f"precision {self.name!r} is a preset with other arithmetic; choose another name")

    def __str__(self) -> str:
        return self.name

    @property
    def wide(self) -> Dtype:
        """Dtype of everything outside matrix products under autocast: residual stream, statistics and loss."""
        return Dtype.FP64 if self.compute is Dtype.FP64 else Dtype.FP32

    @property
    def is_mixed(self) -> bool:
        """True if matrix products use a narrower format than the values around them."""
        return self.compute is not self.wide

    @property
    def narrows_reduction(self) -> bool:
        """True if gradients are rounded before they are sent to other ranks."""
        return self.reduction.mantissa_bits < self.accumulation.mantissa_bits


def _preset(name: str, compute: Dtype, *, reduction: Dtype | None = None, scaling: bool = False) -> Precision:
    """Make a preset with products in `compute`, and everything else but `reduction` in at least float32."""
    wide = compute if compute is Dtype.FP64 else Dtype.FP32
    made = Precision(
        name=name,
        compute=compute,
        weights=compute,
        accumulation=wide,
        reduction=reduction or wide,
        master=wide,
        states=wide,
        loss_scaling=LossScaling.DYNAMIC if scaling else LossScaling.NONE,
    )
    Precision.PRESETS[name] = made
    return made


Precision.FP64 = _preset("fp64", Dtype.FP64)
Precision.FP32 = _preset("fp32", Dtype.FP32)
Precision.BF16 = _preset("bf16", Dtype.BF16)
Precision.FP16 = _preset("fp16", Dtype.FP16, scaling=True)
Precision.BF16_REDUCE_BF16 = _preset("bf16-reduce-bf16", Dtype.BF16, reduction=Dtype.BF16)


def precision(name: str) -> Precision:
    """Return the preset called `name`. Raises `UnknownNameError` when there is none."""
    if name not in Precision.PRESETS:
        raise UnknownNameError("precision", name, Precision.PRESETS)
    return Precision.PRESETS[name]
