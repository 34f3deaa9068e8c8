"""The twin's models for tensor parallelism, which compute every rank's products, one after the other.

`split` splits the products of a model as Megatron-LM does (arXiv:1909.08053), with the ranks' shapes, and the sums over
ranks in their dtypes. `GPTModelOrder` follows megatron-core's own GPTModel (local spec, unfused): weights are cast, and
sequences come first.

Shape suffixes: B sequences, T tokens, V vocabulary, C hidden, N rows of a fused weight, G groups of query heads, H
heads times sequences, D head width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.models.transformer import ModelSpec
from meshmark.models.transformer.module import Attention, Block, FeedForward, Transformer, products_of
from meshmark.reference.data import Batch

# --- The twin's model for tensor parallelism that splits products as Megatron-LM does (arXiv:1909.08053).


def split(model: Transformer, tp: int) -> None:
    """Replace the model's linear layers by layers that compute as `tp` ranks do."""
    for module in list(model.modules()):
        if (products := products_of(module)) is None:
            continue
        columns, row = products
        region = _Region(tp)
        module.register_forward_pre_hook(region.enter)
        for name in columns:
            setattr(module, name, _ByColumns(getattr(module, name), tp, region))
        setattr(module, row, _ByRows(getattr(module, row), tp))
    assert model.head is not None
    model.head.output = _ByColumns(model.head.output, tp, None)  # type: ignore[assignment]


class _Region:
    """The input that several layers of a rank read.

    Its gradient is summed over them on every rank, then over ranks.
    """

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.copies: tuple[Tensor, ...] = ()

    def enter(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.copies = copies_of(args[0], self.tp, args[0].dtype)


def copies_of(x: Tensor, tp: int, summed_in: torch.dtype) -> tuple[Tensor, ...]:
    """Return one copy of `x` per rank. Their gradients are summed in the dtype `summed_in`."""
    copies: tuple[Tensor, ...] = _Copies.apply(x, tp, summed_in)  # type: ignore[no-untyped-call]
    return copies


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: int, summed_in: torch.dtype) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.summed_in = summed_in
        return tuple(x.clone() for _ in range(tp))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return functools.reduce(torch.add, [g.to(ctx.summed_in) for g in gradients]), None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a rank's linear layer in megatron-core's order of operations. Its bias makes the output wide."""
    output: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return output


class _Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        of_input = gradient.matmul(weight)
        flat = gradient.contiguous().view(-1, gradient.shape[-1])
        of_weight = flat.t().matmul(x.contiguous().view(-1, x.shape[-1]))
        return of_input, of_weight, flat.sum(dim=0) if ctx.biased else None


class _Linear(nn.Module):
    """Holds the parameters of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, tp: int) -> None:
        super().__init__()
        self.tp, self.weight, self.bias = tp, layer.weight, layer.bias


class _ByColumns(_Linear):
    """A layer of which each rank has some outputs.

    Without a `region`, the gradient of its input is summed over ranks in the products' narrow dtype.
    """

    def __init__(self, layer: nn.Linear, tp: int, region: _Region | None) -> None:
        super().__init__(layer, tp)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        low = torch.get_autocast_dtype(x.device.type)
        copies = self.region.copies if self.region else copies_of(x, self.tp, low)
        biases = (None,) * self.tp if self.bias is None else self.bias.chunk(self.tp)
        parts = zip(copies, self.weight.chunk(self.tp), biases, strict=True)
        return torch.cat([product(*part) for part in parts], dim=-1)


class _ByRows(_Linear):
    """A layer of which each rank has some inputs.

    Outputs are summed over ranks in the narrow dtype, before the bias.
    """

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(self.tp, dim=-1), self.weight.chunk(self.tp, dim=1), strict=True)
        products = [product(own.contiguous(), weight.contiguous()) for own, weight in parts]
        total: Tensor = functools.reduce(torch.add, products)
        return total if self.bias is None else total + self.bias


def split_loss_share(logits_BTV: Tensor, batch: Batch, tp: int) -> Tensor:
    """Like `meshmark.reference.objective.loss_share`, for logits whose vocabulary is split over ranks."""
    loss_BT: Tensor = _CrossEntropy.apply(logits_BTV, batch.targets, tp)  # type: ignore[no-untyped-call]
    return (loss_BT * batch.weights).sum() / batch.total_weight


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that sums exponentials rank by rank, then over ranks.

    A masked target has no term for its logit.
    """

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, targets_BT: Tensor, tp: int) -> Tensor:  # noqa: ANN401
        wide_BTV = logits_BTV.float()
        wide_BTV = wide_BTV - wide_BTV.amax(-1, keepdim=True)
        counted_BT, index_BT1 = targets_BT >= 0, targets_BT.clamp(min=0).unsqueeze(-1)
        told_BT = wide_BTV.gather(-1, index_BT1).squeeze(-1) * counted_BT
        exp_BTV = wide_BTV.exp()
        sum_BT = functools.reduce(torch.add, [own.contiguous().sum(-1) for own in exp_BTV.chunk(tp, -1)])
        ctx.save_for_backward(exp_BTV / sum_BT.unsqueeze(-1), index_BT1, counted_BT)
        return sum_BT.log() - told_BT

    @staticmethod
    def backward(ctx: Any, gradient_BT: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        softmax_BTV, index_BT1, counted_BT = ctx.saved_tensors
        off_BTV = softmax_BTV.scatter_add(-1, index_BT1, -counted_BT.unsqueeze(-1).to(softmax_BTV.dtype))
        return off_BTV * gradient_BT.unsqueeze(-1), None, None


# --- The twin's model for megatron-core's own GPTModel (local spec, unfused).


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
