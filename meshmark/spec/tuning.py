"""How a case's arithmetic is carried out where that is its user's choice and not the framework's: the same for all
adapters, and another way to compute the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from meshmark.errors import InputError, UnknownNameError


class Knob(StrEnum):
    """What can be tuned."""

    COMPILE = "compile"
    OPTIMIZER = "optimizer"
    ATTENTION = "attention"
    LOSS = "loss"
    MATMUL = "matmul"


class Attention(StrEnum):
    """The one kernel of `scaled_dot_product_attention` that may run."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"
    CUDNN = "cudnn"


class Matmul(StrEnum):
    """A setting of matrix products. Both are arithmetic, so that noise is measured with them."""

    TF32 = "tf32"
    """float32 operands are rounded to TF32's 10 bits."""
    WIDE_SUMS = "wide-sums"
    """Parts of a 16-bit product that is split over its inner dim are summed in float32."""


_FUSED, _CHUNKED, NONE = "fused", "chunked", "none"
WORDS = {
    Knob.COMPILE.value: "every block by torch.compile",
    _FUSED: "the optimizer's fused kernel",
    **{a.value: f"attention by the {a} kernel alone" for a in Attention},
    _CHUNKED: "cross-entropy of a few rows at a time, which keeps no copy of the logits",
    Matmul.TF32.value: "float32 products of TF32 operands",
    Matmul.WIDE_SUMS.value: "split 16-bit products summed in float32",
}
"""By what the command line calls it, what it does."""
_ON_A_CPU = frozenset({Attention.FLASH, Attention.MATH})


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Written as its words, such as `compile+fused`; nothing where all is PyTorch's default."""

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
        """Those that are turned."""
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
        """What of it is other arithmetic, not another order of the same."""
        return Tuning(matmul=self.matmul)

    @property
    def passes_otherwise(self) -> bool:
        """Whether forward and backward passes may save other tensors than PyTorch's eager kernels do, and round in
        other places: fused operations keep what is between them wide."""
        return self.compile or self.attention is not None or self.chunked_loss

    def missing(self, device: str) -> Iterator[str]:
        """What of it `device` has not, each with the reason."""
        if device == "cpu" and self.attention is not None and self.attention not in _ON_A_CPU:
            yield f"attention {self.attention} (a CPU has {' and '.join(sorted(_ON_A_CPU))} alone)"
        if device == "cpu" and self.matmul is not None:
            yield f"matmul {self.matmul} (a setting of CUDA's products)"

    @classmethod
    def parse(cls, text: str) -> Self:
        """That of its words, in any order. Raises `UnknownNameError` for another, `InputError` for two of one kind."""
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
