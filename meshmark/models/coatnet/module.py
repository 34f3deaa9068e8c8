"""A small net of convolutions and attention (CoAtNet, arXiv:2106.04803), as a list of layers.

Unlike the paper's, it has neither squeeze-and-excitation nor stochastic depth. Its activation between convolutions is
SiLU. Norms follow convolutions, as in MobileNetV2 (arXiv:1801.04381), because the batch norm after an expansion would
undo the shift of a norm before it.

Shape suffixes: B images, C channels, H and W pixels a side, P pixels, A heads, D head width.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.models.coatnet import CoAtNetSpec, HybridSizes
from meshmark.models.module import Model
from meshmark.models.vision_transformer.module import BatchNorm, Classifier


def norm_of(width: int, batch_norm: bool) -> nn.Module:
    """Return a norm over the batch, or over each whole image by itself (arXiv:1803.08494 with one group)."""
    return BatchNorm(width) if batch_norm else nn.GroupNorm(1, width)


class HybridStem(nn.Module):
    """First layer: images to channels, [B, C, H, W]."""

    def __init__(self, spec: CoAtNetSpec) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(spec.num_channels, spec.convolutions[0], 3, padding=1, bias=False)
        self.norm = norm_of(spec.convolutions[0], spec.batch_norm)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        images_BCHW = images_BCHW.to(self.convolution.weight.dtype)  # exact in all: there are 17 shades
        return F.silu(self.norm(self.convolution(images_BCHW)))


class Bottleneck(nn.Module):
    """Inverted bottleneck: expands to more channels, convolves each over its neighbours, and projects back."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        f, batch = sizes.ffn_hidden, sizes.batch_norm
        self.expand, self.expand_norm = nn.Conv2d(sizes.inner, f, 1, bias=False), norm_of(f, batch)
        self.depthwise = nn.Conv2d(f, f, 3, stride=sizes.stride, padding=1, groups=f, bias=False)
        self.depthwise_norm = norm_of(f, batch)
        self.project, self.project_norm = nn.Conv2d(f, sizes.outer, 1, bias=False), norm_of(sizes.outer, batch)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.silu(self.expand_norm(self.expand(x_BCHW)))
        y_BCHW = F.silu(self.depthwise_norm(self.depthwise(y_BCHW)))
        out: Tensor = self.project_norm(self.project(y_BCHW))
        return out


class RelativeAttention(nn.Module):
    """Attention between all pixels, with a bias per head and relative position (eq. 3 of the paper, by head)."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.head_dim, self.side = sizes.head_dim, sizes.side
        self.q = nn.Linear(sizes.inner, sizes.outer)
        self.k = nn.Linear(sizes.inner, sizes.outer, bias=False)  # softmax cancels a bias of the keys
        self.v = nn.Linear(sizes.inner, sizes.outer)
        self.positions = nn.Embedding(sizes.num_positions, sizes.num_heads)
        self.out = nn.Linear(sizes.outer, sizes.outer)

    def forward(self, x_BPC: Tensor) -> Tensor:
        B, P, _ = x_BPC.shape
        q_BAPD, k_BAPD, v_BAPD = (
            layer(x_BPC).view(B, P, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores_BAPP = q_BAPD @ k_BAPD.transpose(2, 3) / math.sqrt(self.head_dim) + self.bias(x_BPC.device)
        y_BAPD = scores_BAPP.softmax(-1).to(v_BAPD.dtype) @ v_BAPD
        out: Tensor = self.out(y_BAPD.transpose(1, 2).reshape(B, P, -1))
        return out

    def bias(self, device: torch.device) -> Tensor:
        """[A, P, P]."""
        bias_PPA: Tensor = self.positions(self.offsets(device))
        return bias_PPA.permute(2, 0, 1)

    def offsets(self, device: torch.device) -> Tensor:
        """Row of the table for every pair of pixels, int64 [P, P]."""
        pixel_P = torch.arange(self.side**2, device=device)
        row_P, column_P = pixel_P // self.side, pixel_P % self.side
        rows_PP = row_P[:, None] - row_P + self.side - 1
        return rows_PP * (2 * self.side - 1) + column_P[:, None] - column_P + self.side - 1


class HybridFeedForward(nn.Module):
    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(sizes.outer, sizes.ffn_hidden), nn.Linear(sizes.ffn_hidden, sizes.outer)

    def forward(self, x_BPC: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_BPC), approximate="tanh"))
        return out


class HybridTransformer(nn.Module):
    """Pre-norm transformer block on [B, C, H, W], computed on pixels [B, P, C].

    Where the image becomes smaller, it is pooled before attention.
    """

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.stride = sizes.stride
        self.attention_norm, self.attention = nn.LayerNorm(sizes.inner), RelativeAttention(sizes)
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(sizes.outer), HybridFeedForward(sizes)

    def forward(self, x_BCHW: Tensor, beside_BCHW: Tensor) -> Tensor:
        """Apply the block to `x`. `beside` is the output of the shortcut, which is added to the attention's."""
        normed_BHWC = self.attention_norm(x_BCHW.permute(0, 2, 3, 1))
        pooled_BCHW = pooled(normed_BHWC.permute(0, 3, 1, 2), self.stride)
        x_BPC = beside_BCHW.flatten(2).transpose(1, 2) + self.attention(pooled_BCHW.flatten(2).transpose(1, 2))
        x_BPC = x_BPC + self.feed_forward(self.feed_forward_norm(x_BPC))
        out: Tensor = x_BPC.transpose(1, 2).reshape(beside_BCHW.shape)
        return out


def pooled(x_BCHW: Tensor, stride: int) -> Tensor:
    return F.avg_pool2d(x_BCHW, stride) if stride > 1 else x_BCHW


class HybridBlock(nn.Module):
    """A bottleneck or a transformer block with a shortcut. Maps [B, C, H, W] to images, which may be smaller."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.stride = sizes.stride
        self.bottleneck = None if sizes.attends else Bottleneck(sizes)
        self.transformer = HybridTransformer(sizes) if sizes.attends else None
        self.shortcut: nn.Module = nn.Identity()
        if sizes.projects:
            self.shortcut = nn.Conv2d(sizes.inner, sizes.outer, 1, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        beside_BCHW = self.shortcut(pooled(x_BCHW, self.stride))
        if self.transformer is not None:
            out: Tensor = self.transformer(x_BCHW, beside_BCHW)
            return out
        assert self.bottleneck is not None
        out = beside_BCHW + self.bottleneck(x_BCHW)
        return out


class PixelClassifier(Classifier):
    """Last layer: [B, C, H, W] to logits [B, V], by the mean over normalised pixels."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out: Tensor = super().forward(x_BCHW.flatten(2).transpose(1, 2))
        return out


class CoAtNet(Model):
    block: ClassVar = HybridBlock
    spec: CoAtNetSpec

    def make_embedding(self) -> nn.Module:
        return HybridStem(self.spec)

    def make_block(self, index: int) -> nn.Module:
        return HybridBlock(self.spec.blocks[index])

    def make_head(self) -> nn.Module:
        return PixelClassifier(self.spec.attentions[-1], self.spec.num_classes)
