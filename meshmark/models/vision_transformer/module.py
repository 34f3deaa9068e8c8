"""A small vision transformer (arXiv:2010.11929), as a list of layers.

Shape suffixes: B images, N channels, H and W pixels, P patches, K values of a patch, C hidden, V classes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.models.module import Model
from meshmark.models.transformer.module import Block
from meshmark.models.vision_transformer import VisionSpec


class BatchNorm(nn.BatchNorm1d):
    """Batch norm over all rows of [rows, C], or all pixels of [B, C, H, W].

    It computes in at least float32, whatever dtype its weights have.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        tracks = self.track_running_stats  # which FairScale's checkpoints turn off for the first of two passes
        if self.training and tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean, variance = (self.running_mean, self.running_var) if tracks or not self.training else (None, None)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        normed = F.batch_norm(wide, mean, variance, weight, bias, self.training, self.momentum or 0.0, self.eps)
        return normed.to(x.dtype)


class PatchEmbedding(nn.Module):
    """First layer: images [B, N, H, W] to the residual stream [B, P, C]."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.patch_size = spec.patch_size
        self.patches = nn.Linear(spec.patch_values, spec.hidden, bias=False)  # the norm has one
        self.norm = BatchNorm(spec.hidden) if spec.batch_norm else nn.LayerNorm(spec.hidden)
        self.positions = nn.Embedding(spec.seq_len, spec.hidden)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, images_BNHW: Tensor) -> Tensor:
        images_BNHW = images_BNHW.to(self.patches.weight.dtype)  # exact in all: there are 256 shades at most
        patches_BKP = F.unfold(images_BNHW, self.patch_size, stride=self.patch_size)
        x_BPC = self.patches(patches_BKP.transpose(1, 2))
        x_BPC = x_BPC + self.positions(torch.arange(x_BPC.shape[1], device=x_BPC.device))
        # Add positions first: the layer norm of a blank patch would scale its gradient by 300, too much for fp16.
        x_BPC = self.norm(x_BPC.flatten(0, 1)).view_as(x_BPC)
        out: Tensor = self.dropout(x_BPC)
        return out


class Classifier(nn.Module):
    """Last layer: the mean of the normalised residual stream [B, P, C] over patches to logits [B, V]."""

    def __init__(self, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, num_classes, bias=False)

    def forward(self, x_BPC: Tensor) -> Tensor:
        out: Tensor = self.output(self.norm(x_BPC).mean(1))
        return out


class VisionTransformer(Model):
    block: ClassVar = Block
    spec: VisionSpec

    def make_embedding(self) -> nn.Module:
        return PatchEmbedding(self.spec)

    def make_block(self, index: int) -> nn.Module:
        return Block(self.spec)

    def make_head(self) -> nn.Module:
        return Classifier(self.spec.hidden, self.spec.num_classes)
