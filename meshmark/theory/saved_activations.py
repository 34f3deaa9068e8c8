"""Bytes that PyTorch's eager autograd saves in the forward pass of this project's own model, exact to the byte.

The model is meshmark/reference/transformer.py, on a CPU, operation by operation. No formulas of papers are used,
because their models fuse and mask other things.

Widths per token: h hidden, f feed-forward, v vocabulary; a heads. Those inside a tensor-parallel region and v are
divided by `tp` (arXiv:1909.08053 sec. 3). Under sequence parallelism, those between two regions are divided by `sp`
(arXiv:2205.05198 sec. 4.2.2). A storage that two operations save counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.spec.precision import Precision
from meshmark.theory.grid import Column

INDEX_BYTES = 8
"""Bytes of one position of the learned embedding. The indices of tokens are the batch itself."""
RNG_STATE_BYTES = 5056
"""Bytes of the CPU's random state, which PyTorch's checkpoint keeps for every block that it will recompute."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per element, by place."""

    stream: int
    """The residual stream and the norms' outputs."""
    low: int
    """Inside attention and feed-forward."""
    wide: int
    """Statistics, the inside of RMSNorm and the loss: at least float32."""
    autocast: bool = False
    """True if a matrix product with a wide input or weight saves its own low-precision copy."""

    @classmethod
    def of(cls, precision: Precision, *, casts_weights: bool) -> Widths:
        """Return the widths of a precision. With `casts_weights`, mixed precision also runs the stream in low, not by
        autocast.
        """
        wide, low = precision.wide.itemsize, precision.compute.itemsize
        autocast = precision.is_mixed and not casts_weights
        return cls(stream=wide if autocast else low, low=low, wide=wide, autocast=autocast)

    @property
    def casts_weights(self) -> bool:
        return self.stream < self.wide


def norm_bytes(model: ModelSpec, widths: Widths, num_products: int) -> int:
    """Return the bytes per token of one norm before `num_products` matrix products.

    It covers the norm's input, its inside, and what the products save. LayerNorm is one operation and saves its input,
    mean and reciprocal deviation. RMSNorm is written out: the product with the reciprocal root saves both factors in
    the wide precision, and the product with the weight saves the normed value. Autocast gives every product its own
    low-precision copy of the output, which is then freed.
    """
    h = model.hidden
    output = 2 * num_products * h if widths.autocast else widths.stream * h
    if model.family is Family.GPT:
        return widths.stream * (h + 2) + output
    return widths.wide * (h + 1) + widths.stream * h + output


def attention_bytes(model: ModelSpec, widths: Widths, tp: Column) -> Column:
    """Return the bytes per token of queries, keys, values, output and one logarithm per head.

    The output has the memory order of the queries: by head after rotary positions. The projection then saves a copy
    ordered by token (with one head, both orders are the same).
    """
    copied = (model.family is Family.LLAMA) & (model.num_heads > tp)
    elements = np.where(copied, 3, 2) * model.hidden + 2 * model.kv_hidden
    return (widths.low * elements + widths.wide * model.num_heads) / tp


def feed_forward_bytes(model: ModelSpec, widths: Widths, tp: Column) -> Column:
    """Return the bytes per token of GELU's input and output, or of SwiGLU's gate, its SiLU, the other factor and the
    product.
    """
    return (2 if model.family is Family.GPT else 4) * widths.low * model.ffn_hidden / tp


def block_bytes(model: ModelSpec, widths: Widths, tp: Column, sp: Column) -> Column:
    """Return the bytes per token of one block.

    Residual sums save nothing, because the streams are the norms' inputs.
    """
    norms = norm_bytes(model, widths, 3) + norm_bytes(model, widths, 1 if model.family is Family.GPT else 2)
    return norms / sp + attention_bytes(model, widths, tp) + feed_forward_bytes(model, widths, tp)


def head_bytes(model: ModelSpec, widths: Widths, tp: Column, sp: Column) -> Column:
    """Return the bytes per token of the last norm, and of the log-softmax, which the loss saves instead of the
    logits.
    """
    return norm_bytes(model, widths, 1) / sp + logit_bytes(model, widths, tp)


def logit_bytes(model: ModelSpec, widths: Widths, tp: Column) -> Column:
    """Return the bytes per token of one tensor of the loss: the log-softmax, its gradient, or the gradient of the
    logits.
    """
    return widths.wide * model.vocab_size / tp


def cast_weight_bytes(model: ModelSpec, num_layers: int, has_head: bool) -> int:
    """Return the bytes of autocast's low-precision copies of matrices (before division by tp), which its products
    save.
    """
    h, f = model.hidden, model.ffn_hidden
    matrices = 2 * h * (h + model.kv_hidden) + (2 if model.family is Family.GPT else 3) * h * f
    return 2 * (num_layers * matrices + (model.vocab_size * h if has_head else 0))
