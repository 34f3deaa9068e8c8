"""The decoder-only transformer that every framework trains, as a list of layers.

Shape suffixes: B sequences, T tokens, C hidden, H query heads, K key-value heads, D head width, F feed-forward width,
V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.models.mixture import MixtureSpec
from meshmark.models.module import Model
from meshmark.models.transformer import Family, ModelSpec
from meshmark.models.vision_transformer import TransformerSpec

TextSpec = ModelSpec | MixtureSpec
"""Spec of a transformer over tokens."""


_NORM_EPS = 1e-5
"""Epsilon of norms in models that do not specify one; PyTorch's default."""
_ROPE_THETA = 10_000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467), computed in at least float32."""

    def __init__(self, size: int, eps: float = _NORM_EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_BTC: Tensor) -> Tensor:
        wide = x_BTC if x_BTC.dtype is torch.float64 else x_BTC.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x_BTC.dtype) * self.weight


def norm(spec: TransformerSpec) -> nn.Module:
    eps = spec.norm_eps if isinstance(spec, ModelSpec) else _NORM_EPS
    return RMSNorm(spec.hidden, eps) if spec.family is Family.LLAMA else nn.LayerNorm(spec.hidden, eps)


@functools.lru_cache(maxsize=8)
def _rotation(
    num_tokens: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (arXiv:2104.09864, eq. 15), each [T, D/2], rounded once from float64."""
    with torch.no_grad():
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(num_tokens, dtype=torch.float64), frequency)
        return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rotate(x_BHTD: Tensor, theta: float = _ROPE_THETA) -> Tensor:
    """Rotary position embedding, in at least float32; halves are rotated against each other."""
    wide = x_BHTD if x_BHTD.dtype is torch.float64 else x_BHTD.float()
    cos_TD, sin_TD = _rotation(x_BHTD.shape[2], x_BHTD.shape[3], theta, wide.dtype, wide.device)
    a, b = wide.chunk(2, dim=-1)
    return torch.cat((a * cos_TD - b * sin_TD, a * sin_TD + b * cos_TD), dim=-1).to(x_BHTD.dtype)


class Attention(nn.Module):
    """Self-attention with grouped queries, causal but in an encoder.

    The number of heads is read off the projections' outputs, so that a tensor-parallel adapter can replace `q`, `k`,
    `v` by layers that yield this rank's heads alone, and `out` by one that sums over ranks.
    """

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        bias = spec.family is not Family.LLAMA
        self.head_dim, self.dropout, self.rotary = spec.head_dim, spec.dropout, spec.family is Family.LLAMA
        self.rope_theta = spec.rope_theta if isinstance(spec, ModelSpec) else _ROPE_THETA
        self.causal = spec.causal
        self.q = nn.Linear(spec.hidden, spec.hidden, bias=bias)
        # Softmax cancels a bias of the keys. A GPT has one nevertheless, like GPT-2.
        self.k = nn.Linear(spec.hidden, spec.kv_hidden, bias=bias and spec.family is not Family.IMAGES)
        self.v = nn.Linear(spec.hidden, spec.kv_hidden, bias=bias)
        self.out = nn.Linear(spec.hidden, spec.hidden, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q_BHTD = self.q(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        k_BKTD = self.k(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        v_BKTD = self.v(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        y_BHTD = self.attend(q_BHTD, k_BKTD, v_BKTD)
        out: Tensor = self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1))
        return out

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        """Return the attention of any number of heads over whole sequences, as [B, H, T, D]."""
        if self.rotary:
            q_BHTD, k_BKTD = rotate(q_BHTD, self.rope_theta), rotate(k_BKTD, self.rope_theta)
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BKTD,
            v_BKTD,
            is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q_BHTD.shape[1] != k_BKTD.shape[1],
        )


class FeedForward(nn.Module):
    """GELU network of a GPT, or SwiGLU network of a LLaMA (arXiv:2002.05202, eq. 6)."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        bias = spec.family is not Family.LLAMA
        self.gate = None if bias else nn.Linear(spec.hidden, spec.ffn_hidden, bias=False)
        self.up = nn.Linear(spec.hidden, spec.ffn_hidden, bias=bias)
        self.down = nn.Linear(spec.ffn_hidden, spec.hidden, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        up_BTF = self.up(x_BTC)
        y_BTF = F.gelu(up_BTF, approximate="tanh") if self.gate is None else F.silu(self.gate(x_BTC)) * up_BTF
        out: Tensor = self.down(y_BTF)
        return out


def products_of(module: nn.Module) -> tuple[list[str], str] | None:
    """Return the linear layers of attention or a feed-forward network that Megatron-LM splits, or None for other
    modules.

    They are those it splits by columns, which all read the module's input, and the one it splits by rows
    (arXiv:1909.08053, section 3).
    """
    if isinstance(module, Attention):
        return ["q", "k", "v"], "out"
    if isinstance(module, FeedForward):
        return ["up"] if module.gate is None else ["up", "gate"], "down"
    return None


class Embedding(nn.Module):
    """First layer: tokens [B, T] to the residual stream [B, T, C]."""

    def __init__(self, spec: TextSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden)
        self.positions = nn.Embedding(spec.seq_len, spec.hidden) if spec.family is not Family.LLAMA else None
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.tokens(tokens_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        out: Tensor = self.dropout(x_BTC)
        return out


class Block(nn.Module):
    """Pre-norm transformer block, [B, T, C] to [B, T, C]."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(spec), Attention(spec)
        self.feed_forward_norm, self.feed_forward = norm(spec), self.make_feed_forward(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def make_feed_forward(self, spec: TransformerSpec) -> nn.Module:
        return FeedForward(spec)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC)))
        out: Tensor = x_BTC + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTC)))
        return out


class Head(nn.Module):
    """Last layer: residual stream [B, T, C] to logits [B, T, V]."""

    def __init__(self, spec: TextSpec) -> None:
        super().__init__()
        self.norm = norm(spec)
        self.output = nn.Linear(spec.hidden, spec.vocab_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.output(self.norm(x_BTC))
        return out


class Transformer(Model):
    """The transformer of a `ModelSpec`.

    If one part holds both the embedding and a tied head, they share one parameter. Otherwise the head holds a copy,
    `head.output.weight`.
    """

    block: ClassVar = Block
    spec: TextSpec
    embedding: Embedding | None
    head: Head | None

    def __init__(self, spec: TextSpec, layers: Sequence[int] | None = None) -> None:
        super().__init__(spec, layers)
        if spec.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def make_embedding(self) -> Embedding:
        return Embedding(self.spec)

    def make_block(self, index: int) -> Block:
        return Block(self.spec)

    def make_head(self) -> Head:
        return Head(self.spec)
