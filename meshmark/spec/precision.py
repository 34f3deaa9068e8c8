"""The arithmetic of a training step: which numbers are kept, multiplied and summed in which format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from meshmark.errors import InputError, UnknownNameError


class Dtype(StrEnum):
    """A format of floating-point numbers, by PyTorch's name."""

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
        """As datasheets and command lines have it."""
        return {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self]

    @property
    def mantissa_bits(self) -> int:
        """Bits of the significand's fraction."""
        return {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}[self]


class LossScaling(StrEnum):
    """Whether gradients are computed of a multiple of the loss, lest small ones vanish."""

    NONE = "none"
    DYNAMIC = "dynamic"
    """The multiple falls when a gradient overflows, and that step is skipped; it grows again later."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of a training step. Presets are attributes, and in PRESETS by name.

    Raises `InputError` for another arithmetic under the name of a preset.
    """

    PRESETS: ClassVar[dict[str, Precision]] = {}
    FP64: ClassVar[Precision]
    FP32: ClassVar[Precision]
    BF16: ClassVar[Precision]
    """Mixed: bf16 matrix products, fp32 master weights, gradients accumulated and reduced in fp32."""
    FP16: ClassVar[Precision]
    """The same in fp16, with dynamic loss scaling."""
    BF16_REDUCE_BF16: ClassVar[Precision]
    """Mixed, as `BF16`, but gradients travel and are summed over data-parallel ranks in bf16: half the bytes, and the
    rounding of every rank's part and of the sum is asked for."""

    name: str
    """Stands in the ids of cases."""
    compute: Dtype
    """Of the matrix products."""
    weights: Dtype
    """That the products read, and that ZeRO gathers: a copy of the masters where those are wider, made by the sharding,
    or by autocast one product at a time."""
    accumulation: Dtype
    """In which gradients of micro-batches are summed on a rank."""
    reduction: Dtype
    """In which gradients travel and are summed over data-parallel ranks."""
    master: Dtype
    """Of the weights that the optimizer updates."""
    states: Dtype
    """Of the optimizer's moments."""
    loss_scaling: LossScaling = LossScaling.NONE

    def __post_init__(self) -> None:
        if self.PRESETS.get(self.name, self) != self:
            raise InputError(f"precision {self.name!r} is a preset of another arithmetic; name yours otherwise")

    def __str__(self) -> str:
        return self.name

    @property
    def wide(self) -> Dtype:
        """Of what is in no matrix product under autocast: the residual stream, statistics and the loss."""
        return Dtype.FP64 if self.compute is Dtype.FP64 else Dtype.FP32

    @property
    def is_mixed(self) -> bool:
        """Whether the products run in a narrower format than what is around them."""
        return self.compute is not self.wide

    @property
    def narrows_reduction(self) -> bool:
        """Whether gradients are rounded on their way to the other ranks."""
        return self.reduction.mantissa_bits < self.accumulation.mantissa_bits


def _preset(name: str, compute: Dtype, *, reduction: Dtype | None = None, scaling: bool = False) -> Precision:
    """`compute` in the products, and float32 at least in all else but `reduction`."""
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
    """The preset called `name`. Raises `UnknownNameError` when there is none."""
    if name not in Precision.PRESETS:
        raise UnknownNameError("precision", name, Precision.PRESETS)
    return Precision.PRESETS[name]
