"""What a net of convolutions and attention is: its dimensions and what follows from them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from meshmark.errors import InputError
from meshmark.spec.convolutional import Convolution, Convolutional, layer_of
from meshmark.spec.model_config import LayerSizes
from meshmark.spec.model_spec import Family


@dataclass(frozen=True, kw_only=True)
class CoAtNetSpec(Convolutional):
    """Dimensions of a CoAtNet (arXiv:2106.04803 section 2): a convolution, inverted bottlenecks around depthwise
    convolutions (MBConv, arXiv:1801.04381), then transformer blocks whose attention adds a bias by relative position;
    the mean over normalised pixels and a classifier. Where blocks become wider, their images become half as high and
    wide: by a stride of the depthwise convolution, or pooled before attention.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "coatnet"
    module: ClassVar[str] = "meshmark.reference.coatnet:CoAtNet"
    convolutions: tuple[int, ...]
    """Channels of the blocks of convolutions; the first convolution has those of the first."""
    attentions: tuple[int, ...]
    """Of the transformer blocks, which follow."""
    expansion: int = 4
    """By how much the inside of a block is wider than what goes out."""
    head_dim: int = 8
    batch_norm: bool = False
    """Normalise behind convolutions by batch (see `VisionSpec.batch_norm`), not all of an image by itself."""
    init_std: float = 0.1

    def __post_init__(self) -> None:
        widths = (*self.convolutions, *self.attentions)
        self.check_sizes(widths, sum(block.stride == 2 for block in self.blocks) if widths else 0)
        for field in ("convolutions", "attentions"):
            if not getattr(self, field):
                raise InputError(f"model {self.name!r}: it has no {field}; a ResNetSpec or a VisionSpec may be meant")
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
        """The first convolution and its norm; the head's norm and its classifier, which has no bias."""
        first, last, pixels = self.convolutions[0], self.attentions[-1], self.image_size**2
        stem = Convolution(inner=self.num_channels, outer=first, kernel=9, pixels=pixels)
        classifier = last * self.num_classes
        head = LayerSizes(
            num_parameters=2 * last + classifier, num_tensors=3, products=classifier, outputs=self.num_classes
        )
        return (layer_of([stem], first * pixels), *(block.layer for block in self.blocks), head)

    @property
    def family(self) -> Family:
        return Family.COATNET

    @property
    def widest(self) -> int:
        """Numbers at a position that a layer works on: the patches of a convolution laid out, the inside of a block, or
        a row of scores a head."""
        inside = [block.ffn_hidden for block in self.blocks]
        scores = [block.num_heads * block.side**2 for block in self.blocks if block.attends]
        return max(9 * max(inside), *scores)


@dataclass(frozen=True, kw_only=True)
class HybridSizes:
    """One block."""

    inner: int
    """Channels that come in."""
    outer: int
    """That go out."""
    stride: int
    side: int
    """Pixels a side of an image as it goes out."""
    ffn_hidden: int
    """Channels inside."""
    head_dim: int
    attends: bool
    """Whether it is a transformer block, not an inverted bottleneck."""
    batch_norm: bool
    """Behind its convolutions."""

    @property
    def projects(self) -> bool:
        """Whether the shortcut pools and is a convolution of single pixels."""
        return self.inner != self.outer

    @property
    def num_heads(self) -> int:
        return self.outer // self.head_dim

    @property
    def num_positions(self) -> int:
        """By which one pixel may lie from another."""
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
        """To more channels, each by itself over its neighbours, and back."""
        pixels, before, f = self.side**2, (self.side * self.stride) ** 2, self.ffn_hidden
        expand = Convolution(inner=self.inner, outer=f, kernel=1, pixels=before)
        depthwise = Convolution(inner=f, outer=f, kernel=9, pixels=pixels, groups=f)
        project = Convolution(inner=f, outer=self.outer, kernel=1, pixels=pixels)
        return layer_of([expand, depthwise, project], self.outer * pixels)

    @property
    def _transformer(self) -> LayerSizes:
        """Norms, attention with a bias a head by relative position, feed-forward; biases but of the keys."""
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
"""A block of every kind; small enough for milliseconds."""
