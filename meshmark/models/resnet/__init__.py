"""Residual networks: dimensions and derived sizes. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from meshmark.models.config import LayerSizes
from meshmark.models.convolutional import Convolution, Convolutional, layer_of


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(Convolutional):
    """Dimensions of a residual network (arXiv:1512.03385 section 4.2).

    The model is a convolution, blocks of two convolutions, a mean over pixels and a classifier. A batch norm follows
    every convolution. Where blocks become wider, the height and width of images are halved, and the shortcut is a 1x1
    convolution (option B of the paper).

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "residual-network"
    module: ClassVar[str] = "meshmark.models.resnet.module:ResNet"
    widths: tuple[int, ...]
    """Channels of each block. The first convolution has as many as the first block."""
    init_std: float = 0.1

    def __post_init__(self) -> None:
        self.check_sizes(self.widths, sum(block.stride == 2 for block in self.blocks) if self.widths else 0)

    @property
    def blocks(self) -> list[ResidualSizes]:
        return list(self._blocks())

    def _blocks(self) -> Iterator[ResidualSizes]:
        inner, size = self.widths[0], self.image_size
        for outer in self.widths:
            stride = 1 if inner == outer else 2
            size //= stride
            yield ResidualSizes(inner=inner, outer=outer, stride=stride, pixels=size**2)
            inner = outer

    @cached_property
    def layers(self) -> tuple[LayerSizes, ...]:
        """The first convolution and its norm, the blocks, and a classifier without bias."""
        first, pixels = self.widths[0], self.image_size**2
        stem = Convolution(inner=self.num_channels, outer=first, kernel=9, pixels=pixels)
        head = Convolution(inner=self.widths[-1], outer=self.num_classes, kernel=1, pixels=1, normed=False)
        blocks = [layer_of(b.convolutions, b.outer * b.pixels) for b in self.blocks]
        return (layer_of([stem], first * pixels), *blocks, layer_of([head], self.num_classes))

    @property
    def widest(self) -> int:
        """Largest number of values a layer handles per position: the unfolded patches of a convolution."""
        return 9 * max(self.widths)


@dataclass(frozen=True, kw_only=True)
class ResidualSizes:
    """Sizes of one block."""

    inner: int
    """Input channels."""
    outer: int
    """Output channels."""
    stride: int
    pixels: int
    """Pixels of an output image."""

    @property
    def projects(self) -> bool:
        """True if the shortcut is a convolution."""
        return self.inner != self.outer

    @property
    def convolutions(self) -> list[Convolution]:
        first = Convolution(inner=self.inner, outer=self.outer, kernel=9, pixels=self.pixels)
        second = Convolution(inner=self.outer, outer=self.outer, kernel=9, pixels=self.pixels)
        shortcut = Convolution(inner=self.inner, outer=self.outer, kernel=1, pixels=self.pixels)
        return [first, second, *([shortcut] if self.projects else [])]


RESNET_MINI = ResNetSpec(name="resnet-mini", image_size=8, num_classes=10, widths=(8, 16))
"""A model with both kinds of blocks, small enough to train in milliseconds."""
DIGITS = {"resnet-digits": RESNET_MINI}
