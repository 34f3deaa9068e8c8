"""Memory of one micro-batch in PyTorch's eager mode: what the forward pass saves, and what the backward pass has alive.

The model is meshmark/models/transformer/module.py, on a CPU, operation by operation, exact to the byte. No formulas of
papers are used, because their models fuse and mask other things. What an operation saved is freed as soon as its own
backward has run. A storage that two operations save counts once.

Widths per token: h hidden, f feed-forward, v vocabulary; a heads. Those inside a tensor-parallel region and v are
divided by `tp` (arXiv:1909.08053 sec. 3). Under sequence parallelism, those between two regions are divided by `sp`
(arXiv:2205.05198 sec. 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshmark.models.transformer import Family, ModelSpec
from meshmark.spec.precision import Precision
from meshmark.theory.grid import Column
from meshmark.theory.partition import Stage

# --- Bytes that PyTorch's eager autograd saves in the forward pass of this project's own model, exact to the byte.

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


# --- Memory that is alive during the backward pass of one micro-batch in PyTorch's eager mode.


@dataclass(frozen=True, kw_only=True)
class Instant:
    """Memory while one operation's backward runs."""

    activations: Column
    """Bytes of what is still saved, and of gradients of activations."""
    made: Column
    """Number of parameters whose gradients this backward pass has made so far, including the operation's own."""
    num_parameters: Column
    """Number of the operation's own parameters. Their gradients are held twice if there is a gradient to add to."""
    waiting: Column | float = 0.0
    """Number of parameters whose gradients are made but not yet stored: a tied head's, until the embedding's is
    added.
    """


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One micro-batch of one stage, with its sizes on one rank."""

    model: ModelSpec
    widths: Widths
    stage: Stage
    tokens: Column
    tp: Column
    sp: Column
    held: Column
    """Bytes that its forward pass keeps."""
    loss_tp: Column
    """Number of ranks that the vocabulary is split over at the loss."""
    kept_weights: Column | float = 0.0
    """Bytes of a block's gathered weights within `held`. They stay until the block's backward is over."""

    @property
    def logits(self) -> Column:
        """Bytes of one tensor of the loss."""
        return self.tokens * logit_bytes(self.model, self.widths, self.loss_tp)

    @property
    def stream(self) -> Column:
        """Bytes of the residual stream, or of its gradient."""
        return self.tokens * self.widths.stream * self.model.hidden / self.sp

    @property
    def low_stream(self) -> Column:
        """Bytes of the stream's low-precision copy, which a product saves or returns."""
        found: Column = self.stream * self.widths.low / self.widths.stream
        return found

    @property
    def block(self) -> Column:
        """Bytes that a block saves."""
        saved = self.tokens * block_bytes(self.model, self.widths, self.tp, self.sp)
        return saved + self._cast(cast_weight_bytes(self.model, 1, False))

    @property
    def block_parameters(self) -> Column:
        return self.model.block_parameters / self.tp

    @property
    def head_parameters(self) -> Column:
        """Parameters of the output projection, whose gradient is made first."""
        found: Column = self.model.vocab_size * self.model.hidden / self.tp * self.stage.has_head
        return found

    @property
    def tied_parameters(self) -> Column:
        """Parameters that a head and an embedding share on this stage."""
        found: Column = self.head_parameters * (self.model.tied_embeddings and self.stage.has_embedding)
        return found

    @property
    def landmarks(self) -> list[int]:
        """Numbers of finished blocks at which a peak can occur.

        Memory changes evenly from the second block to the last but one. The last block has no successor.
        """
        count = self.stage.num_layers
        return sorted({0, 1, count - 2, count - 1} & set(range(count)))

    def before_block(self, done: int) -> Column:
        """Return the bytes still saved when `done` blocks are finished, whose memory and the head's is freed."""
        head = self.tokens * norm_bytes(self.model, self.widths, 1) / self.sp + self.logits
        head = head + self._cast(cast_weight_bytes(self.model, 0, True))
        saved: Column = self.held - head * self.stage.has_head - done * (self.block + self.kept_weights)
        return saved

    def loss(self, tensors: float) -> Instant:
        """Return the instant of the loss.

        `tensors` is how many tensors of the logits' size its backward makes beyond its input. Two are the gradients of
        the log-softmax and of the logits.
        """
        none = np.zeros(len(self.tokens))
        return Instant(activations=self.held + tensors * self.logits, made=none, num_parameters=none)

    def head(self) -> Instant:
        """Return the instant of the output projection.

        The gradient of the logits has replaced the log-softmax. Under autocast, it is freed when the weight's gradient
        is cast.
        """
        made = self.head_parameters
        more = self.stream - (self.logits + self.low_stream if self.widths.autocast else 0.0)
        return Instant(activations=self.held + more, made=made, num_parameters=made)

    def in_block(self, done: int) -> list[Instant]:
        """Return the instants of the block after `done` with the most memory.

        These are the last product of the feed-forward network, the gate of a SwiGLU, the product before it, and the
        projections of queries, keys and values, when everything else is freed.
        """
        if self.widths.autocast:
            return [*self._autocast_feed_forward(done), *self._autocast_attention(done)]
        model, low = self.model, self.widths.low
        inside = self.tokens * low * model.ffn_hidden / self.tp
        matrix = model.ffn_hidden * model.hidden / self.tp
        remaining = self.tokens * norm_bytes(model, self.widths, 3) / self.sp
        q_k_v = self.tokens * low * (model.hidden + 2 * model.kv_hidden) / self.tp
        made, start = self._at_block(done)
        gate = [Instant(activations=start + self.stream + 2 * inside, made=made + matrix, num_parameters=0 * matrix)]
        return [
            Instant(activations=start + self.stream + inside, made=made + matrix, num_parameters=matrix),
            *(gate if model.family is Family.LLAMA else []),
            Instant(activations=start + 2 * self.stream - inside, made=made + 2 * matrix, num_parameters=matrix),
            Instant(
                activations=start - self.block + remaining + 3 * self.stream + q_k_v,
                made=made + self.block_parameters,
                num_parameters=model.hidden**2 / self.tp,
            ),
        ]

    def _at_block(self, done: int) -> tuple[Column, Column]:
        """Return the parameters with gradients and the saved bytes when the block begins.

        The gradient that a later stage sends lies in its receive buffer.
        """
        received = self.stream if not self.stage.has_head and not done else 0.0
        return self.head_parameters + done * self.block_parameters, self.before_block(done) - received

    def _autocast_feed_forward(self, done: int) -> list[Instant]:
        """Return the instants of the feed-forward network under autocast.

        Products make low-precision gradients of their inputs and weights. What a product saved, including its
        low-precision copies of both, is freed before these gradients are cast, the input's first. The instants are the
        last product and the cast of its weight's gradient, the gradients of the activation, and the product before
        with both casts.
        """
        model, low, stream = self.model, self.widths.low, self.stream
        inside = self.tokens * low * model.ffn_hidden / self.tp
        matrix = model.ffn_hidden * model.hidden / self.tp
        copy, gated = low * matrix, model.family is Family.LLAMA
        made, start = self._at_block(done)
        start = start + stream
        none, inner = 0 * matrix, 2 * inside if gated else inside
        # When the first product's backward runs, what the activation saved is freed, and the gate's has run.
        gate = stream - self.low_stream - copy if gated else 0.0
        before, products = start - 2 * inner + gate, 2 if gated else 1
        return [
            Instant(activations=start + self.low_stream + inside + copy, made=made, num_parameters=none),
            Instant(activations=start, made=made + matrix, num_parameters=matrix),
            Instant(activations=start + inner - copy, made=made + matrix, num_parameters=none),
            Instant(activations=before + inside + self.low_stream, made=made + products * matrix, num_parameters=none),
            Instant(activations=before + stream - copy, made=made + products * matrix, num_parameters=none),
            Instant(
                activations=before + stream - (stream if gated else 0.0) - self.low_stream - copy,
                made=made + (products + 1) * matrix,
                num_parameters=matrix,
            ),
        ]

    def _autocast_attention(self, done: int) -> list[Instant]:
        """Return the instants of attention under autocast.

        They are for the projection of the queries, after the others' backward has run: the product, the casts of the
        gradients of its input and weight, and the norm before it.
        """
        own = self.model.hidden**2 / self.tp
        copy, stream, inner = self.widths.low * own, self.stream, self.low_stream / self.tp
        made, start = self._at_block(done)
        rest = start - self.block + self.tokens * norm_bytes(self.model, self.widths, 0) / self.sp + 2 * stream
        made = made + self.block_parameters
        none = 0 * own
        return [
            Instant(activations=rest + 2 * self.low_stream + inner + 2 * copy, made=made - own, num_parameters=none),
            Instant(activations=rest + self.low_stream + stream + copy, made=made - own, num_parameters=none),
            Instant(activations=rest + copy, made=made, num_parameters=own),
            Instant(activations=rest + stream, made=made, num_parameters=none),
        ]

    def embedding(self) -> list[Instant]:
        """Return the instants of the embedding's own backward, which comes last, after that of positions.

        If the embedding is also the head, the sum of both gradients is a third tensor.
        """
        own = self.model.vocab_size * self.model.hidden / self.tp
        positions = self.model.seq_len * self.model.hidden if self.model.family is Family.GPT else 0
        blocks = self.head_parameters + self.stage.num_layers * self.block_parameters + positions
        rest, tied = self.before_block(self.stage.num_layers), self.tied_parameters
        return [
            Instant(activations=rest + self.stream, made=blocks + own, num_parameters=own, waiting=tied),
            Instant(activations=rest, made=blocks + own + tied, num_parameters=own, waiting=2 * tied),
        ]

    def instants(self, loss_tensors: float) -> list[Instant]:
        """Return all instants of the pass."""
        found = [self.loss(loss_tensors), self.head()] if self.stage.has_head else []
        within = [instant for done in self.landmarks for instant in self.in_block(done)]
        found += [replace(instant, waiting=self.tied_parameters) for instant in within]
        return found + (self.embedding() if self.stage.has_embedding else [])

    def _cast(self, num_bytes: float) -> Column:
        """Return the bytes of autocast's copies of weights, which are freed with the rest that their products
        saved.
        """
        return (num_bytes if self.widths.autocast else 0.0) / self.tp
