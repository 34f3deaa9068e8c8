"""What a residual network is: its dimensions and what follows from them. No torch, as in `model_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from meshmark.spec.convolutional import Convolution, Convolutional, layer_of
from meshmark.spec.model_config import LayerSizes
from meshmark.spec.model_spec import Family


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(Convolutional):
    """Dimensions of a residual network (arXiv:1512.03385 section 4.2): a convolution, blocks of two, the mean over
    pixels and a classifier; a batch norm behind every convolution. Where blocks become wider, their images become half
    as high and wide, and the shortcut is a convolution of single pixels (its option B).

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "residual-network"
    module: ClassVar[str] = "meshmark.reference.resnet:ResNet"
    widths: tuple[int, ...]
    """Channels, block by block; the first convolution has those of the first."""
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
        """The first convolution and its norm; the classifier has no bias."""
        first, pixels = self.widths[0], self.image_size**2
        stem = Convolution(inner=self.num_channels, outer=first, kernel=9, pixels=pixels)
        head = Convolution(inner=self.widths[-1], outer=self.num_classes, kernel=1, pixels=1, normed=False)
        blocks = [layer_of(b.convolutions, b.outer * b.pixels) for b in self.blocks]
        return (layer_of([stem], first * pixels), *blocks, layer_of([head], self.num_classes))

    @property
    def family(self) -> Family:
        return Family.RESNET

    @property
    def batch_norm(self) -> bool:
        """Over all pixels of the images of *one micro-batch of one replica*; see `VisionSpec.batch_norm`."""
        return True

    @property
    def widest(self) -> int:
        """Numbers at a position that a layer works on: the patches of a convolution, laid out."""
        return 9 * max(self.widths)


@dataclass(frozen=True, kw_only=True)
class ResidualSizes:
    """One block."""

    inner: int
    """Channels that come in."""
    outer: int
    """That go out."""
    stride: int
    pixels: int
    """Of an image as it goes out."""

    @property
    def projects(self) -> bool:
        """Whether the shortcut is a convolution."""
        return self.inner != self.outer

    @property
    def convolutions(self) -> list[Convolution]:
        first = Convolution(inner=self.inner, outer=self.outer, kernel=9, pixels=self.pixels)
        second = Convolution(inner=self.outer, outer=self.outer, kernel=9, pixels=self.pixels)
        shortcut = Convolution(inner=self.inner, outer=self.outer, kernel=1, pixels=self.pixels)
        return [first, second, *([shortcut] if self.projects else [])]


RESNET_MINI = ResNetSpec(name="resnet-mini", image_size=8, num_classes=10, widths=(8, 16))
"""A block of either kind; small enough for milliseconds."""
