"""Equivalents of a twin: the same step in other arithmetic that a declaration permits.

An adapter declares a precision and who casts. It does not declare in which order rows are summed, which rows share a
micro-batch, whether queries, keys and values are one product, or how attention is computed. Every such choice rounds
16-bit numbers in other places, and all of them are correct. Each noise run draws one engine for every *way* in which
an engine may differ from the twin, and records how far it is from the twin on the same parameters. The ways are kept
separate, because a correct engine computes in one of them: one way must explain all differences of a run. A single
limit for all would be as wide as the widest, and would excuse defects that no arithmetic produces.

Shape suffixes: B sequences, T tokens, C hidden, H heads, K heads of keys and values, D head width.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmark.adapter.contract import Casting
from meshmark.judge.tolerance_model import WAYS
from meshmark.judge.twin import BiasApart, Twin
from meshmark.models.module import Model, random_bits
from meshmark.models.transformer.module import Attention, FeedForward, rotate
from meshmark.reference.data import Batch

_HANDS = 3
"""Number of ways to write attention by hand."""
_MOST_SPLITS = 3
"""Number of ways to split a product: in two, three or four parts."""


def with_equivalents(twin: Twin, run: int) -> Twin:
    """Return `twin` with one engine of every way in `others`, as drawn for noise run `run`."""
    case, casting = twin.case, twin.arithmetic.casting
    ways = WAYS[casting]
    within = dataclasses.replace(twin, arrange=_Rows(twin, run, anyhow=False))
    # Rows that share a micro-batch are summed before rounding. With wide gradients, as in autocast's norms and
    # embeddings, this has no effect, so a real loss of digits cannot be mistaken for it. If weights are cast, all
    # gradients are narrow; then the rows of a micro-batch are part of the declaration.
    regroups = casting is Casting.AUTOCAST and not case.workload.couples_rows and not case.precision.narrows_reduction
    rows, times = within, _groupings(twin) if regroups else []
    if times:
        rows = dataclasses.replace(twin, arrange=_Rows(twin, run, anyhow=True), times=times[run % len(times)])
    others = {ways.reordered: within}
    if ways.regrouped and times:
        others[ways.regrouped] = rows
    if not case.workload.routes:  # one flipped rounding may send a token to another expert
        others[ways.sums] = dataclasses.replace(within, rewrite=_Rewrite(run, fuse=False))
        others[ways.split] = dataclasses.replace(
            within, rewrite=_Rewrite(run, fuse=False, parts=2 + run % _MOST_SPLITS)
        )
        others[ways.products] = dataclasses.replace(rows, rewrite=_Rewrite(run))
        others[ways.forward] = dataclasses.replace(rows, rewrite=_Rewrite(run, forward=True))
    return dataclasses.replace(twin, others=others)


def _groupings(twin: Twin) -> list[Fraction]:
    """Return factors on the number of the twin's micro-batches with which they hold other rows."""
    layout = twin.case.layout
    count = layout.dp * layout.num_micro_batches
    found = [Fraction(1, 2)] if count % 2 == 0 else []
    found += [Fraction(1)] if twin.rows > 1 and count > 1 else []
    return found + ([Fraction(2)] if twin.rows % 2 == 0 else [])


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Reorders rows within every micro-batch of the twin, or across all of them."""

    twin: Twin
    run: int
    anyhow: bool

    def __call__(self, batch: Batch) -> Batch:
        batch = self.twin.arrange(batch)
        parts = 1 if self.anyhow else len(batch) // self.twin.rows
        seed = self.twin.case.workload.seed
        drawn = random_bits(f"equivalent/{self.run}/{self.anyhow}", (len(batch),), seed=seed).view(parts, -1)
        first = torch.arange(parts)[:, None] * drawn.shape[1]
        return batch.take((drawn.argsort(1) + first).flatten())


@dataclasses.dataclass(frozen=True)
class _Rewrite:
    """Replaces a model's layers by ones that compute differently.

    Products sum in another order and are fused, or are in parts. With `forward`, the forward pass also rounds
    differently, mainly in attention.
    """

    run: int
    fuse: bool = True
    forward: bool = False
    parts: int = 1
    """Products that each linear layer is split into, each of some of its outputs."""

    def __call__(self, model: Model) -> None:
        for module in model.modules():
            if type(module) in (nn.Linear, BiasApart):
                module.apart = type(module) is BiasApart  # type: ignore[assignment]
                module.__class__ = _Product
            elif type(module) is Attention and self.fuse:
                module.__class__ = _AttentionByHand if self.forward else _FusedAttention
            elif type(module) is FeedForward and module.gate is not None and self.fuse:
                module.__class__ = _FusedFeedForward
            else:
                continue
            module.run, module.other_forward = self.run, self.forward  # type: ignore[assignment]
            if isinstance(module, _Product):
                module.parts = self.parts


class _Product(nn.Linear):
    """A linear layer whose inner sums run in another order."""

    run: int
    other_forward: bool
    parts: int
    apart: bool
    """Whether the bias is added to a product that is rounded already."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.chunk(self.parts)
        biases = [None] * len(weights) if self.bias is None else self.bias.chunk(self.parts)
        pairs = zip(weights, biases, strict=True)
        found = [product(x, weight, bias, self.run, self.other_forward, self.apart) for weight, bias in pairs]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


class _FusedAttention(Attention):
    """Attention with one product for queries, keys and values, so that its input's gradient is rounded once, not three
    times.
    """

    run: int
    other_forward: bool

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        layers = [self.q, self.k, self.v]
        y = _fused(x_BTC, layers, self.run, self.other_forward)
        heads = [part.reshape(B, T, -1, self.head_dim).transpose(1, 2) for part in y]
        out: Tensor = self.out(self.attend(*heads).transpose(1, 2).reshape(B, T, -1))
        return out


class _AttentionByHand(_FusedAttention):
    """Attention with scores, softmax and the mean of values as separate operations, and the softmax in float32."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return super().forward(x_BTC) if self.run // _HANDS % 2 else Attention.forward(self, x_BTC)

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self.rotary:
            q_BHTD, k_BKTD = rotate(q_BHTD), rotate(k_BKTD)
        groups, hand = q_BHTD.shape[1] // k_BKTD.shape[1], self.run % _HANDS
        k_BHTD, v_BHTD = (x.repeat_interleave(groups, dim=1) for x in (k_BKTD, v_BKTD))
        scale = self.head_dim**-0.5
        if hand == 0:  # narrow scores, scaled when they are wide
            scores_BHTT = (q_BHTD @ k_BHTD.transpose(-2, -1)).float() * scale
        elif hand == 1:  # queries are scaled, narrow
            scores_BHTT = ((q_BHTD * scale) @ k_BHTD.transpose(-2, -1)).float()
        else:  # nothing is rounded between the products
            with torch.autocast(q_BHTD.device.type, enabled=False):
                scores_BHTT = (q_BHTD.float() * scale) @ k_BHTD.float().transpose(-2, -1)
        if self.causal:
            T = scores_BHTT.shape[-1]
            seen = torch.ones(T, T, dtype=torch.bool, device=scores_BHTT.device).tril()
            scores_BHTT = scores_BHTT.masked_fill(~seen, float("-inf"))
        mean_BHTD: Tensor = scores_BHTT.softmax(-1).to(v_BHTD.dtype) @ v_BHTD
        return mean_BHTD


class _FusedFeedForward(FeedForward):
    """Feed-forward network with one product for gate and up."""

    run: int
    other_forward: bool

    def forward(self, x_BTC: Tensor) -> Tensor:
        assert self.gate is not None
        gate, up = _fused(x_BTC, [self.gate, self.up], self.run, self.other_forward)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def _fused(x: Tensor, layers: list[nn.Linear], run: int, other_forward: bool) -> tuple[Tensor, ...]:
    """Apply all `layers` to `x` in one product."""
    biases: list[Tensor] = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers
    ]
    weights: list[Tensor] = [layer.weight for layer in layers]
    apart = any(isinstance(layer, _Product) and layer.apart for layer in layers)
    y = product(x, torch.cat(weights), torch.cat(biases), run, other_forward, apart)
    return torch.split(y, [layer.out_features for layer in layers], dim=-1)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, run: int, other_forward: bool, apart: bool = False
) -> Tensor:
    """Apply a linear layer in the dtype of autocast or of the weights, with inner sums in an order that depends on
    `run`.

    The order changes in the backward pass and, with `other_forward`, also in the forward pass. With `apart`, the bias
    is added to the rounded product, except to one of two dimensions.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    inside, added = (None, bias) if apart and x.dim() > 2 else (bias, None)
    with torch.autocast(device, enabled=False):
        found: Tensor = _Linear.apply(x, weight, inside, run, other_forward)  # type: ignore[no-untyped-call]
    return found if added is None else found + added


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, run: int, other: bool) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.run, ctx.biased = run, bias is not None
        if not other:
            return F.linear(x, weight, bias)
        order = _order(x.shape[-1], run, x.device)
        return F.linear(x.float()[..., order], weight.float()[:, order], None if bias is None else bias.float()).to(
            x.dtype
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        wide = gradient.float()
        outputs = _order(weight.shape[0], ctx.run, x.device)
        of_input = (wide[..., outputs] @ weight.float()[outputs]).to(x.dtype)
        flat, inputs = wide.flatten(0, -2), x.float().flatten(0, -2)
        rows = _order(len(flat), ctx.run, x.device)
        of_weight = (flat[rows].t() @ inputs[rows]).to(weight.dtype)
        return of_input, of_weight, flat[rows].sum(0).to(weight.dtype) if ctx.biased else None, None, None


def _order(size: int, run: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(run)
    return torch.randperm(size, generator=generator).to(device)
