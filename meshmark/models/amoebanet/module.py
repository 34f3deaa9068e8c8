"""A small net of AmoebaNet-D's cells (arXiv:1802.01548), as a list of layers.

Unlike the paper's cells, these take means instead of maxima, and SiLU instead of ReLU. At kinks and ties float32 and
float64 sometimes disagree, and a correct gradient is then far from the exact one. The paper's convolutions of 1 x 7 and
7 x 1 are 1 x 3 and 3 x 1 here, for images of 8 pixels.

Cells pass on one tensor, which concatenates two states: that of the cell before the previous one, and that of the
previous one. A reduction cell halves the former for the next cell too.

Shape suffixes: B images, C channels, H and W pixels, V classes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.models.amoebanet import AmoebaNetSpec, CellSizes
from meshmark.models.module import Model
from meshmark.models.resnet.module import MeanClassifier
from meshmark.models.vision_transformer.module import BatchNorm

Size = int | tuple[int, int]


class Activated(nn.Module):
    """A convolution, its norm and activation."""

    def __init__(self, inner: int, outer: int, kernel: Size = 1, stride: Size = 1) -> None:
        super().__init__()
        padding = (kernel // 2, kernel // 2) if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        self.convolution = nn.Conv2d(inner, outer, kernel, stride=stride, padding=padding, bias=False)
        self.norm = BatchNorm(outer)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.silu(self.norm(self.convolution(x_BCHW)))


def across(width: int, stride: int = 1) -> nn.Sequential:
    """Return two convolutions, one over rows and then one over columns."""
    return nn.Sequential(Activated(width, width, (1, 3), (1, stride)), Activated(width, width, (3, 1), (stride, 1)))


class CellStem(nn.Module):
    """First layer: images to both states, [B, C, H, W]."""

    def __init__(self, spec: AmoebaNetSpec) -> None:
        super().__init__()
        self.entry = Activated(spec.num_channels, spec.cells[0], 3)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        images_BCHW = images_BCHW.to(self.entry.convolution.weight.dtype)  # exact in any dtype: there are 17 shades
        x_BCHW = self.entry(images_BCHW)
        return torch.cat((x_BCHW, x_BCHW), 1)


class Cell(nn.Module):
    """A cell: maps both states [B, C, H, W] to the next two. A reduction cell halves height and width."""

    def __init__(self, sizes: CellSizes) -> None:
        super().__init__()
        self.skip, self.reduces, w = sizes.skip, sizes.reduces, sizes.width
        self.from_skip, self.from_last = Activated(sizes.skip, w), Activated(sizes.last, w)
        if sizes.reduces:
            self.square, self.cross = Activated(w, w, 3, 2), across(w, 2)
            self.halved = Activated(sizes.last, w)
        else:
            self.cross, self.second_cross = across(w), across(w)
            self.points = nn.ModuleList(Activated(w, w) for _ in range(3))

    def states(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the cell before the previous one, and of the previous one."""
        return x_BCHW[:, : self.skip], x_BCHW[:, self.skip :]

    def forward(self, x_BCHW: Tensor) -> Tensor:
        skip_BCHW, last_BCHW = self.states(x_BCHW)
        zero, one = self.from_skip(skip_BCHW), self.from_last(last_BCHW)
        if self.reduces:
            return torch.cat((self.halved(F.avg_pool2d(last_BCHW, 2)), *self._reduced(zero, one)), 1)
        return torch.cat((last_BCHW, *self._normal(zero, one)), 1)

    def _normal(self, zero: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        two = self.points[0](one) + smoothed(one)
        three = one + self.cross(zero)
        four = self.points[1](zero) + self.second_cross(zero)
        five = smoothed(two) + two
        six = smoothed(one) + self.points[2](five)
        return zero, three, four, six

    def _reduced(self, zero: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        two = F.avg_pool2d(zero, 2) + smoothed(zero, 2)
        three = two + self.square(one)
        four = two + self.cross(one)
        return smoothed(three) + two, three, four


def smoothed(x_BCHW: Tensor, stride: int = 1) -> Tensor:
    """Return the mean over each pixel and its neighbours. Pixels outside the image count as zero."""
    return F.avg_pool2d(x_BCHW, 3, stride, 1)


class LastState(MeanClassifier):
    """Last layer: maps the mean over pixels of the last state to logits [B, V]."""

    def __init__(self, spec: AmoebaNetSpec) -> None:
        super().__init__(spec.last_width, spec.num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out: Tensor = super().forward(x_BCHW[:, -self.output.in_features :])
        return out


class AmoebaNet(Model):
    block: ClassVar = Cell
    spec: AmoebaNetSpec

    def make_embedding(self) -> nn.Module:
        return CellStem(self.spec)

    def make_block(self, index: int) -> nn.Module:
        return Cell(self.spec.blocks[index])

    def make_head(self) -> nn.Module:
        return LastState(self.spec)
