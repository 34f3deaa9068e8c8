"""A small residual network of convolutions and batch norms (arXiv:1512.03385), as a list of layers.

Its activation is SiLU. At ReLU's kink float32 and float64 sometimes disagree about a sign, and a correct gradient is
then far from the exact one.

Shape suffixes: B images, C channels, H and W pixels, V classes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.models.module import Model
from meshmark.models.resnet import ResidualSizes, ResNetSpec
from meshmark.models.vision_transformer.module import BatchNorm


class Stem(nn.Module):
    """First layer: images to channels, [B, C, H, W]."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(spec.num_channels, spec.widths[0], 3, padding=1, bias=False)
        self.norm = BatchNorm(spec.widths[0])

    def forward(self, images_BCHW: Tensor) -> Tensor:
        images_BCHW = images_BCHW.to(self.convolution.weight.dtype)  # exact in any dtype: there are 17 shades
        return F.silu(self.norm(self.convolution(images_BCHW)))


class ResidualBlock(nn.Module):
    """Two convolutions with a shortcut. Maps [B, C, H, W] to images, which may be smaller."""

    def __init__(self, sizes: ResidualSizes) -> None:
        super().__init__()
        self.first = nn.Conv2d(sizes.inner, sizes.outer, 3, stride=sizes.stride, padding=1, bias=False)
        self.first_norm = BatchNorm(sizes.outer)
        self.second = nn.Conv2d(sizes.outer, sizes.outer, 3, padding=1, bias=False)
        self.second_norm = BatchNorm(sizes.outer)
        self.shortcut: nn.Module = nn.Identity()
        if sizes.projects:
            projection = nn.Conv2d(sizes.inner, sizes.outer, 1, stride=sizes.stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(projection=projection, norm=BatchNorm(sizes.outer)))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.silu(self.first_norm(self.first(x_BCHW)))
        return F.silu(self.shortcut(x_BCHW) + self.second_norm(self.second(y_BCHW)))


class MeanClassifier(nn.Module):
    """Last layer: the mean over pixels to logits [B, V]."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, num_classes, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out: Tensor = self.output(x_BCHW.mean((2, 3)))
        return out


class ResNet(Model):
    block: ClassVar = ResidualBlock
    spec: ResNetSpec

    def make_embedding(self) -> nn.Module:
        return Stem(self.spec)

    def make_block(self, index: int) -> nn.Module:
        return ResidualBlock(self.spec.blocks[index])

    def make_head(self) -> nn.Module:
        return MeanClassifier(self.spec.widths[-1], self.spec.num_classes)
