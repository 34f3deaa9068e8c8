"""CoAtNet models, which combine convolutions and attention: dimensions and derived sizes. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from meshmark.errors import InputError
from meshmark.models.config import LayerSizes
from meshmark.models.convolutional import Convolution, Convolutional, layer_of


@dataclass(frozen=True, kw_only=True)
class CoAtNetSpec(Convolutional):
    """Dimensions of a CoAtNet (arXiv:2106.04803 section 2).

    The model is a convolution, inverted bottlenecks around depthwise convolutions (MBConv, arXiv:1801.04381),
    transformer blocks, a mean over normalised pixels and a classifier. Attention adds a bias by relative position.
    Where blocks become wider, the height and width of images are halved, by a stride of the depthwise convolution or
    by pooling before attention.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "coatnet"
    module: ClassVar[str] = "meshmark.models.coatnet.module:CoAtNet"
    convolutions: tuple[int, ...]
    """Channels of each convolutional block. The first convolution has as many as the first block."""
    attentions: tuple[int, ...]
    """Channels of each transformer block. These follow the convolutional blocks."""
    expansion: int = 4
    """Ratio of a block's inner width to its output width."""
    head_dim: int = 8
    batch_norm: bool = False
    """Normalise behind convolutions over the batch (see `VisionSpec.batch_norm`) instead of over each image."""
    init_std: float = 0.1

    def __post_init__(self) -> None:
        widths = (*self.convolutions, *self.attentions)
        self.check_sizes(widths, sum(block.stride == 2 for block in self.blocks) if widths else 0)
        for field in ("convolutions", "attentions"):
            if not getattr(self, field):
                raise InputError(f"model {self.name!r}: it has no {field}; use a ResNetSpec or a VisionSpec")
        for field in ("expansion", "head_dim"):
            if (got := getattr(self, field)) < 1:
                raise InputError(f"model {self.name!r}: {field} is {got}, expected at least 1")
        for width in self.attentions:
            if width % self.head_dim:
                raise InputError(
                    f"model {self.name!r}: attentions holds {width}, not divisible by head_dim {self.head_dim}"
                )

    @property
    def blocks(self) -> list[HybridSizes]:
        return list(self._blocks())

    def _blocks(self) -> Iterator[HybridSizes]:
        widths = (*self.convolutions, *self.attentions)
        inner, side = widths[0], self.image_size
        for index, outer in enumerate(widths):
            stride = 1 if inner == outer else 2
            side //= stride
            yield HybridSizes(
                inner=inner,
                outer=outer,
                stride=stride,
                side=side,
                ffn_hidden=self.expansion * outer,
                head_dim=self.head_dim,
                attends=index >= len(self.convolutions),
                batch_norm=self.batch_norm,
            )
            inner = outer

    @cached_property
    def layers(self) -> tuple[LayerSizes, ...]:
        """The stem (first convolution and its norm), the blocks, and the head (a norm and a classifier without
        bias).
        """
        first, last, pixels = self.convolutions[0], self.attentions[-1], self.image_size**2
        stem = Convolution(inner=self.num_channels, outer=first, kernel=9, pixels=pixels)
        classifier = last * self.num_classes
        head = LayerSizes(
            num_parameters=2 * last + classifier, num_tensors=3, products=classifier, outputs=self.num_classes
        )
        return (layer_of([stem], first * pixels), *(block.layer for block in self.blocks), head)

    @property
    def widest(self) -> int:
        """Largest number of values a layer handles per position.

        That is the unfolded patches of a convolution, the inside of a block, or one row of attention scores per head.
        """
        inside = [block.ffn_hidden for block in self.blocks]
        scores = [block.num_heads * block.side**2 for block in self.blocks if block.attends]
        return max(9 * max(inside), *scores)


@dataclass(frozen=True, kw_only=True)
class HybridSizes:
    """Sizes of one block."""

    inner: int
    """Input channels."""
    outer: int
    """Output channels."""
    stride: int
    side: int
    """Height and width of the output images, in pixels."""
    ffn_hidden: int
    """Inner channels."""
    head_dim: int
    attends: bool
    """True for a transformer block, False for an inverted bottleneck."""
    batch_norm: bool
    """True if batch norms follow its convolutions."""

    @property
    def projects(self) -> bool:
        """True if the shortcut pools and applies a 1x1 convolution."""
        return self.inner != self.outer

    @property
    def num_heads(self) -> int:
        return self.outer // self.head_dim

    @property
    def num_positions(self) -> int:
        """Number of relative positions between two pixels."""
        return (2 * self.side - 1) ** 2

    @property
    def layer(self) -> LayerSizes:
        pixels = self.side**2
        shortcut = Convolution(inner=self.inner, outer=self.outer, kernel=1, pixels=pixels, normed=False)
        beside = layer_of([shortcut] if self.projects else [], self.outer * pixels)
        inside = self._transformer if self.attends else self._bottleneck
        return LayerSizes(
            num_parameters=inside.num_parameters + beside.num_parameters,
            num_tensors=inside.num_tensors + beside.num_tensors,
            products=inside.products + beside.products,
            outputs=self.outer * pixels,
            normed=inside.normed,
        )

    @property
    def _bottleneck(self) -> LayerSizes:
        """Sizes of an inverted bottleneck: expand to more channels, convolve each over its neighbours, project
        back.
        """
        pixels, before, f = self.side**2, (self.side * self.stride) ** 2, self.ffn_hidden
        expand = Convolution(inner=self.inner, outer=f, kernel=1, pixels=before)
        depthwise = Convolution(inner=f, outer=f, kernel=9, pixels=pixels, groups=f)
        project = Convolution(inner=f, outer=self.outer, kernel=1, pixels=pixels)
        return layer_of([expand, depthwise, project], self.outer * pixels)

    @property
    def _transformer(self) -> LayerSizes:
        """Sizes of a transformer block: norms, attention with a relative position bias per head, and feed-forward.

        All linear layers but that of the keys have biases.
        """
        i, h, f, pixels = self.inner, self.outer, self.ffn_hidden, self.side**2
        matrices = 3 * i * h + h * h + 2 * h * f
        biases = 3 * h + f + h
        return LayerSizes(
            num_parameters=matrices + biases + 2 * i + 2 * h + self.num_positions * self.num_heads,
            num_tensors=2 * 2 + 2 * 6 - 1 + 1,
            products=(matrices + 2 * pixels * h) * pixels,
            outputs=h * pixels,
        )


COATNET_MINI = CoAtNetSpec(name="coatnet-mini", image_size=8, num_classes=10, convolutions=(8, 16), attentions=(16, 32))
"""A model with every kind of block, small enough to train in milliseconds."""
DIGITS = {
    "coatnet-digits": COATNET_MINI,
    "coatnet-digits-bn": replace(COATNET_MINI, name="coatnet-mini-bn", batch_norm=True),
}
