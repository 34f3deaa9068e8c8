"""DDP by other hands: the same model and the same loss, computed by other operations.

Shape suffixes: B rows, T tokens, C hidden, F outputs of a product, H heads, D a head's width, V vocabulary, N targets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshmark.adapter.engine import AUTOCAST, RankContext
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.models.transformer.module import Attention, Block, FeedForward
from meshmark.reference.data import IGNORED, Batch
from meshmark.spec.case import Case
from meshmark.theory.recipe import TrainingRecipe


@contextlib.contextmanager
def wide(x: Tensor) -> Iterator[None]:
    """Compute in the inputs' own formats, as autocast does for what it keeps in float32."""
    with torch.autocast(x.device.type, enabled=False):
        yield


class OtherParts(DDP):
    """`ddp` whose modules compute by the classes in `parts`. It saves other activations than PyTorch's kernels."""

    parts: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return replace(super().recipe(case), activations_known=False)

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        module = super().wrap(case, context)
        for part in module.modules():
            part.__class__ = self.parts.get(type(part), type(part))
        return module


# --- Embedding and norms.


class OneHotEmbedding(nn.Embedding):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        with wide(self.weight):
            return F.one_hot(tokens_BT, self.num_embeddings).to(self.weight.dtype) @ self.weight


class IndexedEmbedding(nn.Embedding):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.weight.index_select(0, tokens_BT.flatten()).view(*tokens_BT.shape, -1)


class NormByHand(nn.LayerNorm):
    def forward(self, x_BTC: Tensor) -> Tensor:
        centred_BTC = x_BTC - x_BTC.mean(-1, keepdim=True)
        root_BT1 = (centred_BTC.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return centred_BTC / root_BT1 * self.weight + self.bias


class NormByMoments(nn.LayerNorm):
    """The variance as mean of squares less square of the mean, in float64."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        x = x_BTC.double()
        mean = x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True) - mean.square()
        normed = ((x - mean) * (variance + self.eps).rsqrt()).to(x_BTC.dtype)
        return torch.addcmul(self.bias, normed, self.weight)


# --- Products.


class EinsumLinear(nn.Linear):
    def forward(self, x_BTC: Tensor) -> Tensor:
        product = torch.einsum("btc,fc->btf", x_BTC, self.weight)
        return product if self.bias is None else product + self.bias


class TransposedLinear(nn.Linear):
    """The weight is read from a transposed copy."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return F.linear(x_BTC, self.weight.t().contiguous().t(), self.bias)


class HalvedLinear(nn.Linear):
    """Two products, each of half of the outputs."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        halves = zip(self.weight.chunk(2), biases, strict=True)
        return torch.cat([F.linear(x_BTC, weight, bias) for weight, bias in halves], dim=-1)


class LinearByRows(nn.Linear):
    """One product for every row of the micro-batch."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return torch.stack([F.linear(x_TC, self.weight, self.bias) for x_TC in x_BTC])


# --- Attention and feed-forward.


class HeadByHead(Attention):
    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        heads = zip(*(x.split(1, dim=1) for x in (q_BHTD, k_BHTD, v_BHTD)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*head, is_causal=self.causal) for head in heads], dim=1)


class QueriesInChunks(Attention):
    """A quarter of the queries at a time, over the keys up to its last."""

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        T = q_BHTD.shape[2]
        mask_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).tril()
        size = T // 4
        return torch.cat(
            [
                F.scaled_dot_product_attention(
                    q_BHTD[:, :, i : i + size],
                    k_BHTD[:, :, : i + size],
                    v_BHTD[:, :, : i + size],
                    attn_mask=mask_TT[i : i + size, : i + size],
                )
                for i in range(0, T, size)
            ],
            dim=2,
        )


class OnlineSoftmax(Attention):
    """Keys in two blocks: each block's softmax is put right by both blocks' greatest score (arXiv:1805.02867)."""

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        T = q_BHTD.shape[2]
        mask_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).tril()
        total, weighted, most = 0.0, 0.0, torch.full_like(q_BHTD[..., :1].float(), -torch.inf)
        for keys in (slice(0, T // 2), slice(T // 2, T)):
            scores = (q_BHTD @ k_BHTD[:, :, keys].mT).float() / self.head_dim**0.5
            scores = scores.masked_fill(~mask_TT[:, keys], -torch.inf)
            top = torch.maximum(most, scores.detach().amax(-1, keepdim=True))
            parts, again = (scores - top).exp(), (most - top).exp()
            with wide(parts):
                weighted = weighted * again + parts @ v_BHTD[:, :, keys].float()
            total, most = total * again + parts.sum(-1, keepdim=True), top
        return (weighted / total).to(v_BHTD.dtype)


class GeluByHand(FeedForward):
    def forward(self, x_BTC: Tensor) -> Tensor:
        up = self.up(x_BTC)
        x = up if up.dtype is torch.float64 else up.float()
        gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        return self.down(gelu.to(up.dtype))


class SequenceFirst(FeedForward):
    """Tokens before rows, as Megatron-LM stores them."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return super().forward(x_BTC.transpose(0, 1).contiguous()).transpose(0, 1)


class FeedForwardInChunks(FeedForward):
    """A quarter of the tokens at a time."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return torch.cat([super(FeedForwardInChunks, self).forward(x) for x in x_BTC.chunk(4, dim=1)], dim=1)


class CheckpointedBlock(Block):
    def forward(self, x_BTC: Tensor) -> Tensor:
        return checkpoint(super().forward, x_BTC, use_reentrant=False)


class ReentrantBlock(Block):
    def forward(self, x_BTC: Tensor) -> Tensor:
        return checkpoint(super().forward, x_BTC, use_reentrant=True) if self.training else super().forward(x_BTC)


class OneHotEmbeddingDDP(OtherParts):
    parts = {nn.Embedding: OneHotEmbedding}


class IndexedEmbeddingDDP(OtherParts):
    parts = {nn.Embedding: IndexedEmbedding}


class NormByHandDDP(OtherParts):
    parts = {nn.LayerNorm: NormByHand}


class NormByMomentsDDP(OtherParts):
    parts = {nn.LayerNorm: NormByMoments}


class EinsumDDP(OtherParts):
    parts = {nn.Linear: EinsumLinear}


class TransposedWeightsDDP(OtherParts):
    parts = {nn.Linear: TransposedLinear}


class HalvedProductsDDP(OtherParts):
    parts = {nn.Linear: HalvedLinear}


class ProductsByRowsDDP(OtherParts):
    parts = {nn.Linear: LinearByRows}


class HeadByHeadDDP(OtherParts):
    parts = {Attention: HeadByHead}


class QueriesInChunksDDP(OtherParts):
    parts = {Attention: QueriesInChunks}


class OnlineSoftmaxDDP(OtherParts):
    parts = {Attention: OnlineSoftmax}


class GeluByHandDDP(OtherParts):
    parts = {FeedForward: GeluByHand}


class SequenceFirstDDP(OtherParts):
    parts = {FeedForward: SequenceFirst}


class FeedForwardInChunksDDP(OtherParts):
    parts = {FeedForward: FeedForwardInChunks}


class CheckpointedBlocksDDP(OtherParts):
    parts = {Block: CheckpointedBlock}


class ReentrantCheckpointsDDP(OtherParts):
    parts = {Block: ReentrantBlock}


class CompiledDDP(OtherParts):
    """Blocks are graphs of AOTAutograd, run without Inductor's kernels."""

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        module = super().wrap(case, context)
        for block in module.module.blocks.values():
            block.compile(backend="aot_eager")
        return module


# --- The loss.


class LossByHand(DDPEngine):
    """Log-sum-exp less the target's logit, of every target."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        logits_NV, targets_N = outputs.float().flatten(0, -2), batch.targets.flatten()
        known_N = targets_N >= 0
        chosen_N = logits_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]
        return ((logits_NV.logsumexp(-1) - chosen_N) * known_N).sum() / batch.total_weight


class LossByOneHot(DDPEngine):
    """The sum of log-softmax times one-hot targets."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets_N = batch.targets.flatten()
        ones_NV = F.one_hot(targets_N.clamp(min=0), outputs.shape[-1]) * (targets_N >= 0)[:, None]
        return -(outputs.float().flatten(0, -2).log_softmax(-1) * ones_NV).sum() / batch.total_weight


class MeanOfMicroBatch(DDPEngine):
    """The micro-batch's own mean, times its share of the global batch's targets."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        mean = F.cross_entropy(outputs.float().transpose(1, 2), batch.targets)
        return mean * (batch.weights.sum() / batch.total_weight)


class WideLoss(DDPEngine):
    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss_share(outputs.double(), batch).float()


class HeadInChunks(DDPEngine):
    """Logits and loss of eight positions at a time, computed again in the backward pass, so that none are kept."""

    def forward(self, inputs: Tensor) -> Tensor:
        head = self.module.module.head
        kept, head.output = head.output, nn.Identity()
        try:
            return super().forward(inputs)
        finally:
            head.output = kept

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        parts = zip(outputs.split(8, 1), batch.targets.split(8, 1), strict=True)
        shares = [checkpoint(self._summed, hidden, targets, use_reentrant=False) for hidden, targets in parts]
        return torch.stack(shares).sum() / batch.total_weight

    def _summed(self, hidden: Tensor, targets: Tensor) -> Tensor:
        dtype = AUTOCAST.get(self.case.precision.compute)
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype is not None):
            logits = self.module.module.head.output(hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class HeadInChunksDDP(OtherParts):
    engine = HeadInChunks


class LossByHandDDP(OtherParts):
    engine = LossByHand


class LossByOneHotDDP(OtherParts):
    engine = LossByOneHot


class MeanOfMicroBatchDDP(OtherParts):
    engine = MeanOfMicroBatch


class WideLossDDP(OtherParts):
    engine = WideLoss
