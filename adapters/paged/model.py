"""Compute a batch of a Llama model whose keys and values lie in blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshmark.inference.contract import EngineOptions
from meshmark.inference.model import PRECISIONS
from meshmark.inference.quantized import unpack


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens of one sequence that a batch computes."""

    tokens: tuple[int, ...]
    start: int
    """Position of the first of them."""
    blocks: tuple[int, ...]
    """Block table: the block of positions 0 to block size - 1, and so on."""
    all_rows: bool
    """True if log probabilities are asked for after each token, not after the last alone."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of one step, equal on every rank."""

    spans: tuple[Span, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy first, from and to."""


class PagedLlama:
    """One tensor-parallel rank's share of the weights, and its KV cache of shape
    (layers, 2, blocks, block size, KV heads, head size)."""

    def __init__(self, folder: Path, options: EngineOptions, rank: int = 0) -> None:
        from safetensors.torch import load_file

        self.config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        if self.config["model_type"] != "llama":
            raise ValueError(f"a model of type {self.config['model_type']!r}; the paged engine serves 'llama'")
        precision = PRECISIONS[options.precision]
        self.dtype, self.tp, self.rank = precision.dtype, options.tp, rank
        self._weight_bits = precision.weight_bits
        self._block_size = options.block_size
        self.head_size: int = self.config["head_dim"]
        self.heads = self.config["num_attention_heads"] // self.tp
        self.kv_heads = self.config["num_key_value_heads"] // self.tp
        whole = load_file(folder / "model.safetensors")
        self._weights = {name: self._share(name, w).contiguous() for name, w in whole.items()}
        self._weights = {n: w.to(self.dtype) if w.is_floating_point() else w for n, w in self._weights.items()}
        shape = (self.num_layers, 2, options.num_blocks, options.block_size, self.kv_heads, self.head_size)
        self.cache = torch.zeros(shape, dtype=precision.cache_dtype or self.dtype)
        theta = self.config["rope_parameters"]["rope_theta"]
        self._frequencies = 1.0 / (theta ** (torch.arange(0, self.head_size, 2).float() / self.head_size))

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def _share(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's part: heads and hidden units are dealt out, the rest is whole."""
        if name.endswith("weight_shape"):
            return weight
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            return weight.chunk(self.tp, 0)[self.rank]
        if "o_proj" in name or "down_proj" in name:
            return weight.chunk(self.tp, 1)[self.rank]
        return weight

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> list[Tensor]:
        """Return log probabilities for each span, of shape (rows, vocabulary). Writes the cache."""
        for source, target in batch.copies:
            self.cache[:, :, target] = self.cache[:, :, source]
        spans = batch.spans
        positions = torch.cat([self.positions(span) for span in spans])
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = (f(torch.cat([angles, angles], -1)).to(self.dtype)[:, None] for f in (torch.cos, torch.sin))
        x = self._weights["model.embed_tokens.weight"][torch.tensor([t for span in spans for t in span.tokens])]
        for layer in range(self.num_layers):
            path = f"model.layers.{layer}."
            h = self._norm(x, path + "input_layernorm")
            q, k, v = (
                self._linear(h, f"{path}self_attn.{name}_proj").view(len(h), -1, self.head_size) for name in "qkv"
            )
            q, k = (y * cos + _turned(y) * sin for y in (q, k))
            done, start = [], 0
            for span in spans:
                part = slice(start, start := start + len(span.tokens))
                self.write(layer, span, k[part], v[part])
                done.append(self.attend(layer, span, q[part]).flatten(-2))
            x = x + self.reduce(self._linear(torch.cat(done), path + "self_attn.o_proj"), layer, "attention")
            h = self._norm(x, path + "post_attention_layernorm")
            h = functional.silu(self._linear(h, path + "mlp.gate_proj")) * self._linear(h, path + "mlp.up_proj")
            x = x + self.reduce(self._linear(h, path + "mlp.down_proj"), layer, "mlp")
        rows = [
            y if span.all_rows else y[-1:]
            for y, span in zip(torch.split(x, [len(span.tokens) for span in spans]), spans, strict=True)
        ]
        logits = self._linear(self._norm(torch.cat(rows), "model.norm"), "lm_head")
        return list(torch.split(logits.float().log_softmax(-1), [len(y) for y in rows]))

    def positions(self, span: Span) -> Tensor:
        """Return the positions that rotary embeddings turn a span's tokens by."""
        return torch.arange(span.start, span.start + len(span.tokens))

    def write(self, layer: int, span: Span, k: Tensor, v: Tensor) -> None:
        """Write keys and values of shape (tokens, KV heads, head size) to a span's blocks."""
        where = torch.arange(span.start, span.start + len(span.tokens))
        blocks, offsets = torch.tensor(span.blocks)[where // self._block_size], where % self._block_size
        self.cache[layer, 0, blocks, offsets] = self.narrow(k)
        self.cache[layer, 1, blocks, offsets] = self.narrow(v)

    def narrow(self, x: Tensor) -> Tensor:
        """Return keys or values in the cache's format, with what is too large for it as its largest number."""
        limits = torch.finfo(self.cache.dtype)
        return x.clamp(limits.min, limits.max).to(self.cache.dtype)

    def attend(self, layer: int, span: Span, q: Tensor) -> Tensor:
        """Return the attention of queries of shape (tokens, heads, head size) to all tokens up to each."""
        end = span.start + len(span.tokens)
        held = self.cache[layer][:, torch.tensor(span.blocks)].flatten(1, 2)[:, :end].to(self.dtype)
        k, v = self.spread(held).transpose(1, 2)
        mask = torch.arange(end) <= torch.arange(span.start, end)[:, None]
        out: Tensor = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=self.scale
        )
        return out[0].transpose(0, 1)

    @property
    def scale(self) -> float:
        """Factor of attention scores."""
        return float(self.head_size**-0.5)

    def spread(self, held: Tensor) -> Tensor:
        """Return keys and values with one head for each head of queries, from those of the KV heads."""
        return held.repeat_interleave(self.heads // self.kv_heads, dim=2)

    def reduce(self, x: Tensor, layer: int, part: str) -> Tensor:
        """Return the sum over tensor-parallel ranks, after "attention" or "mlp"."""
        if self.tp > 1:
            dist.all_reduce(x)
        return x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weight(name))

    def weight(self, name: str) -> Tensor:
        """Return a layer's weight, from integers and scales if it is kept so: they are never whole for two layers."""
        packed = self._weights.get(name + ".weight_packed")
        if packed is None:
            return self._weights[name + ".weight"]
        scale = self._weights[name + ".weight_scale"]
        codes = unpack(packed, self._weight_bits).to(self.dtype)
        return (codes.view(*scale.shape, -1) * scale[..., None]).view(len(codes), -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self._weights[name + ".weight"] * y.to(self.dtype)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
