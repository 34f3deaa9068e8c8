"""The twin's model for megatron-core's own GPTModel (local spec, unfused).

It computes every tensor-parallel rank's products, one after the other, in GPTModel's order of operations. Weights are
cast, and sequences come first.

Shape suffixes: T tokens, B sequences, C hidden, N rows of a fused weight, G groups of query heads, H heads times
sequences, D head width, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from meshmark.judge.split_products import copies_of, product
from meshmark.reference.transformer import Attention, Block, FeedForward, Transformer
from meshmark.spec.model_spec import ModelSpec


class GPTModelOrder(Transformer):
    """The model, with the reference's parameters under the same names.

    Queries, keys and values are one product, and biases of row-parallel products are added separately.
    """

    def __init__(self, spec: ModelSpec, tp: int) -> None:
        super().__init__(spec)
        self.tp, self.num_groups, self.head_dim = tp, spec.num_kv_heads, spec.head_dim

    def forward(self, tokens_BT: Tensor) -> Tensor:
        assert self.embedding is not None and self.embedding.positions is not None and self.head is not None
        places_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        x_BTC = self.embedding.tokens(tokens_BT) + self.embedding.positions(places_BT)
        x_TBC = x_BTC.transpose(0, 1).contiguous()
        for block in self.blocks.values():
            assert isinstance(block, Block) and isinstance(block.feed_forward, FeedForward)
            x_TBC = x_TBC + self._attend(block.attention, block.attention_norm(x_TBC))
            x_TBC = x_TBC + self._feed_forward(block.feed_forward, block.feed_forward_norm(x_TBC))
        entered = self._entered(self.head.norm(x_TBC))
        weights = self.head.output.weight.chunk(self.tp)
        logits_TBV = torch.cat([product(*part) for part in zip(entered, weights, strict=True)], dim=-1)
        return logits_TBV.transpose(0, 1).contiguous()

    def _entered(self, x_TBC: Tensor) -> tuple[Tensor, ...]:
        """Return one copy per rank. Their gradients are summed in the dtype in which the products make them."""
        return copies_of(x_TBC, self.tp, x_TBC.dtype)

    def _attend(self, attention: Attention, x_TBC: Tensor) -> Tensor:
        """Apply attention with the fused rows of each head group: its queries, then the key, then the value."""
        projections = attention.q, attention.k, attention.v
        weight_NC, bias_N = self._fused([p.weight for p in projections]), self._fused([p.bias for p in projections])
        parts = zip(self._entered(x_TBC), weight_NC.chunk(self.tp), bias_N.chunk(self.tp), strict=True)
        return self._by_rows([self._scores(product(*part)) for part in parts], attention.out)

    def _fused(self, tensors: list[Tensor]) -> Tensor:
        by_group = [x.view(self.num_groups, -1, self.head_dim, *x.shape[1:]) for x in tensors]
        return torch.cat(by_group, 1).flatten(0, 2)

    def _scores(self, fused_TBN: Tensor) -> Tensor:
        """Return the attention output of one rank's heads."""
        T, B, _ = fused_TBN.shape
        D = self.head_dim
        fused_TBGN = fused_TBN.view(T, B, self.num_groups // self.tp, -1)
        q, k, v = torch.split(fused_TBGN, [fused_TBGN.shape[-1] - 2 * D, D, D], dim=3)
        q = q.reshape(T, B, -1, D)
        if shared := q.shape[2] // k.shape[2] - 1:
            k, v = (x.repeat_interleave(shared + 1, dim=2) for x in (k, v))
        q_THD, k_THD, v_THD = q.reshape(T, -1, D), k.reshape(T, -1, D), v.reshape(T, -1, D)
        start = torch.zeros(q_THD.shape[1], T, T, dtype=q.dtype, device=q.device)
        keys_HDT = k_THD.transpose(0, 1).transpose(1, 2)
        scores_HTT = torch.baddbmm(start, q_THD.transpose(0, 1), keys_HDT, beta=0.0, alpha=D**-0.5).float()
        if self.spec.causal:
            later_TT = torch.triu(torch.ones(T, T, dtype=torch.bool, device=q.device), diagonal=1)
            scores_HTT = scores_HTT.masked_fill(later_TT, -10000.0)
        y_HTD = torch.bmm(torch.softmax(scores_HTT, -1).to(q.dtype), v_THD.transpose(0, 1))
        return y_HTD.view(B, -1, T, D).permute(2, 0, 1, 3).contiguous().view(T, B, -1)

    def _feed_forward(self, network: FeedForward, x_TBC: Tensor) -> Tensor:
        """Apply the feed-forward network. Biases of the first product are added separately."""
        up = network.up
        parts = zip(self._entered(x_TBC), up.weight.chunk(self.tp), up.bias.chunk(self.tp), strict=True)
        return self._by_rows([F.gelu(product(x, w) + bias, approximate="tanh") for x, w, bias in parts], network.down)

    def _by_rows(self, parts: list[Tensor], layer: torch.nn.Linear) -> Tensor:
        weights = (weight.contiguous() for weight in layer.weight.chunk(self.tp, dim=1))
        total: Tensor = functools.reduce(torch.add, [product(*part) for part in zip(parts, weights, strict=True)])
        return total + layer.bias
