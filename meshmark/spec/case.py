"""The unit of measurement: one adapter, workload, layout and precision, and its tuning.

Tuning options are chosen by the user, not by the framework. They apply to all adapters alike, and are other ways to
compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from meshmark.errors import InputError, LayoutError, UnknownNameError
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload

# --- Tuning options that a user chooses, not the framework.


class Knob(StrEnum):
    """A category of tuning options."""

    COMPILE = "compile"
    OPTIMIZER = "optimizer"
    ATTENTION = "attention"
    LOSS = "loss"
    MATMUL = "matmul"


class Attention(StrEnum):
    """The only `scaled_dot_product_attention` kernel that may run."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"
    CUDNN = "cudnn"


class Matmul(StrEnum):
    """A setting of matrix products. Both change the arithmetic, so noise is measured with them."""

    TF32 = "tf32"
    """Round float32 operands to TF32's 10 bits."""
    WIDE_SUMS = "wide-sums"
    """Sum the parts of a 16-bit product that is split over its inner dimension in float32."""


_FUSED, _CHUNKED, NONE = "fused", "chunked", "none"
WORDS = {
    Knob.COMPILE.value: "every block by torch.compile",
    _FUSED: "the optimizer's fused kernel",
    **{a.value: f"attention by the {a} kernel alone" for a in Attention},
    _CHUNKED: "cross-entropy of a few rows at a time, which keeps no copy of the logits",
    Matmul.TF32.value: "float32 products of TF32 operands",
    Matmul.WIDE_SUMS.value: "split 16-bit products summed in float32",
}
"""Description of each option, by its name on the command line."""
_ON_A_CPU = frozenset({Attention.FLASH, Attention.MATH})


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Tuning options of a case. Its string is their names, such as `compile+fused`; empty for PyTorch's defaults."""

    compile: bool = False
    fused_optimizer: bool = False
    attention: Attention | None = None
    chunked_loss: bool = False
    matmul: Matmul | None = None

    def __str__(self) -> str:
        return "+".join(self.words)

    def __bool__(self) -> bool:
        return bool(self.words)

    @property
    def words(self) -> list[str]:
        asked = {Knob.COMPILE.value: self.compile, _FUSED: self.fused_optimizer, _CHUNKED: self.chunked_loss}
        own = {self.attention, self.matmul} | {word for word, wanted in asked.items() if wanted}
        return [word for word in WORDS if word in own]

    @property
    def knobs(self) -> list[Knob]:
        """The categories with an option that is not the default."""
        turned = {
            Knob.COMPILE: self.compile,
            Knob.OPTIMIZER: self.fused_optimizer,
            Knob.ATTENTION: self.attention,
            Knob.LOSS: self.chunked_loss,
            Knob.MATMUL: self.matmul,
        }
        return [knob for knob, value in turned.items() if value]

    @property
    def arithmetic(self) -> Tuning:
        """The options that change the arithmetic, without those that only change the order of operations."""
        return Tuning(matmul=self.matmul)

    @property
    def passes_otherwise(self) -> bool:
        """True if passes may save other tensors than PyTorch's eager kernels, and round in other places.

        Fused operations keep intermediate values in a wider format.
        """
        return self.compile or self.attention is not None or self.chunked_loss

    def missing(self, device: str) -> Iterator[str]:
        """Yield the options that `device` does not support, each with the reason."""
        if device == "cpu" and self.attention is not None and self.attention not in _ON_A_CPU:
            yield f"attention {self.attention} (a CPU has {' and '.join(sorted(_ON_A_CPU))} alone)"
        if device == "cpu" and self.matmul is not None:
            yield f"matmul {self.matmul} (a setting of CUDA's products)"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse option names in any order.

        Raises `UnknownNameError` for an unknown name, and `InputError` for two names of one category.
        """
        words = [word for word in text.replace("+", ",").split(",") if word]
        if words == [NONE]:
            words = []
        if unknown := [word for word in words if word not in WORDS]:
            raise UnknownNameError("tuning", unknown[0], [*WORDS, NONE])
        attention, matmul = [Attention(w) for w in words if w in set(Attention)], [w for w in words if w in set(Matmul)]
        if len(attention) > 1 or len(matmul) > 1:
            raise InputError(f"tuning {text!r}: expected one kind of attention, and one setting of products, at most")
        return cls(
            compile=Knob.COMPILE.value in words,
            fused_optimizer=_FUSED in words,
            attention=attention[0] if attention else None,
            chunked_loss=_CHUNKED in words,
            matmul=Matmul(matmul[0]) if matmul else None,
        )


# --- The unit of measurement: one adapter, workload, layout and precision, and its tuning.

CHOOSE = "choose another --world, --layouts, --global-batch, --workload, --model or --adapters"
"""Advice appended to errors about layouts that do not fit."""
_PLAIN = Tuning()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix, whether or not its layout fits its workload."""

    adapter: str
    workload: Workload
    layout: Layout
    precision: Precision = Precision.FP32
    tuning: Tuning = Tuning()

    @property
    def id(self) -> str:
        return "-".join([self.adapter, self.layout.id, self.workload.id, *self.computed])

    @property
    def computed(self) -> list[str]:
        """The names of the precision and, if there is one, of the tuning."""
        return [str(self.precision), *([str(self.tuning)] if self.tuning else [])]


@dataclass(frozen=True, kw_only=True)
class Case(Cell):
    """A cell that can be measured. Its id is stable, readable and what pytest's `-k` selects on.

    Raises `LayoutError` when the layout cannot be laid over the workload.
    """

    def __post_init__(self) -> None:
        self.layout.check(self.workload.model, self.workload.global_batch)

    @property
    def world_size(self) -> int:
        return self.layout.world_size


@dataclass(frozen=True, kw_only=True)
class InvalidLayout(Cell):
    """A cell whose layout does not fit its workload. It is skipped, with a reason."""

    reason: str


def cell(
    *,
    adapter: str,
    workload: Workload,
    layout: Layout,
    precision: Precision = Precision.FP32,
    tuning: Tuning = _PLAIN,
) -> Case | InvalidLayout:
    """Return the case of these arguments, or an `InvalidLayout` that says why there is none."""
    try:
        return Case(adapter=adapter, workload=workload, layout=layout, precision=precision, tuning=tuning)
    except LayoutError as error:
        return InvalidLayout(
            adapter=adapter,
            workload=workload,
            layout=layout,
            precision=precision,
            tuning=tuning,
            reason=str(error),
        )


def expect_fit(cells: Sequence[Cell]) -> None:
    """Raise `LayoutError` with every reason if there are cells but none of them is a case."""
    misfits = {cell.id: f"{cell.adapter}: {cell.reason}" for cell in cells if isinstance(cell, InvalidLayout)}
    if misfits and not any(isinstance(cell, Case) for cell in cells):
        raise LayoutError(f"{'; '.join(misfits.values())}; {CHOOSE}")
