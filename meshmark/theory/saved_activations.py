"""What PyTorch's eager autograd keeps of the forward pass of this project's own model
(meshmark/reference/transformer.py) on a CPU, operation by operation, to the byte: no formula of a paper, whose models
fuse and mask other things.

Widths a token: h hidden, f feed-forward, v vocabulary; a heads. Those inside a tensor-parallel region and v are over
`tp` (arXiv:1909.08053 sec. 3), under sequence parallelism those between two over `sp` (arXiv:2205.05198 sec. 4.2.2).
What two operations save is counted once: a storage is kept, not a use of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.spec.precision import Precision
from meshmark.theory.grid import Column

INDEX_BYTES = 8
"""One position of the learned embedding; tokens' indices are the batch itself."""
RNG_STATE_BYTES = 5056
"""The CPU's random state, which PyTorch's checkpoint keeps of every block that it will compute again."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of an element, by where it is."""

    stream: int
    """The residual stream and the norms' outputs."""
    low: int
    """Inside attention and feed-forward."""
    wide: int
    """Statistics, RMSNorm's inside and the loss: float32 at least."""
    autocast: bool = False
    """A matrix product that finds a wide input or weight saves a low copy of its own."""

    @classmethod
    def of(cls, precision: Precision, *, casts_weights: bool) -> Widths:
        """`casts_weights`: a mixed precision that runs the stream too in the low one, in place of autocast."""
        wide, low = precision.wide.itemsize, precision.compute.itemsize
        autocast = precision.is_mixed and not casts_weights
        return cls(stream=wide if autocast else low, low=low, wide=wide, autocast=autocast)

    @property
    def casts_weights(self) -> bool:
        return self.stream < self.wide


def norm_bytes(model: ModelSpec, widths: Widths, num_products: int) -> int:
    """One norm, a token, before `num_products` matrix products: its input, its inside, and what the products save.

    LayerNorm is one operation and saves its input, mean and reciprocal deviation. RMSNorm is written out: the product
    with the reciprocal root saves both factors in the wide precision, the product with the weight the normed value.
    Autocast gives every product its own low copy of the output, which itself is then forgotten.
    """
    h = model.hidden
    output = 2 * num_products * h if widths.autocast else widths.stream * h
    if model.family is Family.GPT:
        return widths.stream * (h + 2) + output
    return widths.wide * (h + 1) + widths.stream * h + output


def attention_bytes(model: ModelSpec, widths: Widths, tp: Column) -> Column:
    """Queries, keys, values, output and one logarithm a head. The output lies as the queries do: by head where rotary
    positions were written, and then the projection saves a copy that lies by token (of one head, the same thing)."""
    copied = (model.family is Family.LLAMA) & (model.num_heads > tp)
    elements = np.where(copied, 3, 2) * model.hidden + 2 * model.kv_hidden
    return (widths.low * elements + widths.wide * model.num_heads) / tp


def feed_forward_bytes(model: ModelSpec, widths: Widths, tp: Column) -> Column:
    """GELU's input and output; SwiGLU's gate, its SiLU, the other factor and the product."""
    return (2 if model.family is Family.GPT else 4) * widths.low * model.ffn_hidden / tp


def block_bytes(model: ModelSpec, widths: Widths, tp: Column, sp: Column) -> Column:
    """One block, a token. Residual sums save nothing: the streams are the norms' inputs."""
    norms = norm_bytes(model, widths, 3) + norm_bytes(model, widths, 1 if model.family is Family.GPT else 2)
    return norms / sp + attention_bytes(model, widths, tp) + feed_forward_bytes(model, widths, tp)


def head_bytes(model: ModelSpec, widths: Widths, tp: Column, sp: Column) -> Column:
    """The last norm, and the log-softmax, which the loss saves instead of the logits, a token."""
    return norm_bytes(model, widths, 1) / sp + logit_bytes(model, widths, tp)


def logit_bytes(model: ModelSpec, widths: Widths, tp: Column) -> Column:
    """One tensor of the loss, a token: the log-softmax, its gradient, or the gradient of the logits."""
    return widths.wide * model.vocab_size / tp


def cast_weight_bytes(model: ModelSpec, num_layers: int, has_head: bool) -> int:
    """The low copies of its matrices (all over tp) that autocast makes for a forward pass, which its products save."""
    h, f = model.hidden, model.ffn_hidden
    matrices = 2 * h * (h + model.kv_hidden) + (2 if model.family is Family.GPT else 3) * h * f
    return 2 * (num_layers * matrices + (model.vocab_size * h if has_head else 0))
