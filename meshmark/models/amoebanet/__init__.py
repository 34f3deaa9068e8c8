"""AmoebaNet models: their dimensions and the sizes derived from them. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from meshmark.errors import InputError
from meshmark.models.config import LayerSizes
from meshmark.models.convolutional import Convolution, Convolutional, layer_of


@dataclass(frozen=True, kw_only=True)
class AmoebaNetSpec(Convolutional):
    """Dimensions of a network of AmoebaNet-D cells (arXiv:1802.01548), which GPipe cuts (arXiv:1811.06965).

    The network is a convolution, the cells, a mean over pixels and a classifier. Each cell reads the states of the two
    cells before it. A batch norm follows every convolution. A cell that is wider than the previous one is a reduction
    cell, which halves the height and width of its images.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "amoebanet"
    module: ClassVar[str] = "meshmark.models.amoebanet.module:AmoebaNet"
    cells: tuple[int, ...]
    """Channels of one operation in each cell. The first convolution has as many as the first cell."""
    init_std: float = 0.1

    def __post_init__(self) -> None:
        self.check_sizes(self.cells, sum(cell.reduces for cell in self.blocks) if self.cells else 0)
        if len(self.cells) > 1 and self.blocks[-1].reduces:
            raise InputError(
                f"model {self.name!r}: its last cell (widths {self.cells}) reduces, and no later cell would read its "
                "output; end with two cells of one width"
            )

    @property
    def blocks(self) -> list[CellSizes]:
        return list(self._blocks())

    def _blocks(self) -> Iterator[CellSizes]:
        width = skip = last = self.cells[0]
        side = self.image_size
        for after in self.cells:
            cell = CellSizes(skip=skip, last=last, width=after, reduces=after != width, side=side)
            yield cell
            width, skip, last, side = after, cell.next_skip, cell.next_last, cell.next_side

    @cached_property
    def layers(self) -> tuple[LayerSizes, ...]:
        """The stem (the first convolution and its norm, which gives both states), the cells and a classifier without
        bias.
        """
        first, pixels = self.cells[0], self.image_size**2
        stem = Convolution(inner=self.num_channels, outer=first, kernel=9, pixels=pixels)
        head = Convolution(inner=self.last_width, outer=self.num_classes, kernel=1, pixels=1, normed=False)
        blocks = [layer_of(c.convolutions, (c.next_skip + c.next_last) * c.next_side**2) for c in self.blocks]
        return (layer_of([stem], 2 * first * pixels), *blocks, layer_of([head], self.num_classes))

    @property
    def last_width(self) -> int:
        """Channels of the last cell's state."""
        return self.blocks[-1].next_last

    @property
    def widest(self) -> int:
        """Largest number of values a layer handles per position: unfolded convolution patches, or both states."""
        return max(9 * max(self.cells), *(cell.skip + cell.last for cell in self.blocks))


@dataclass(frozen=True, kw_only=True)
class CellSizes:
    """Sizes of one cell."""

    skip: int
    """Channels of the state from two cells before."""
    last: int
    """Channels of the previous cell's state."""
    width: int
    """Channels of one operation."""
    reduces: bool
    side: int
    """Height and width of the incoming images, in pixels."""

    @property
    def next_side(self) -> int:
        return self.side // 2 if self.reduces else self.side

    @property
    def next_skip(self) -> int:
        """Channels of `skip` for the next cell: the previous state, unchanged or halved in height and width."""
        return self.width if self.reduces else self.last

    @property
    def next_last(self) -> int:
        """Channels of the cell's output state, which concatenates some of its inner states."""
        return (3 if self.reduces else 4) * self.width

    @property
    def convolutions(self) -> list[Convolution]:
        """The convolutions, in the order of `meshmark.models.amoebanet.module.Cell`."""
        before, after, w = self.side**2, self.next_side**2, self.width
        entries = [Convolution(inner=inner, outer=w, kernel=1, pixels=before) for inner in (self.skip, self.last)]

        def inside(kernel: int, pixels: int) -> Convolution:
            return Convolution(inner=w, outer=w, kernel=kernel, pixels=pixels)

        if self.reduces:
            across = self.next_side * self.side  # the first of a pair halves one side
            halved = Convolution(inner=self.last, outer=w, kernel=1, pixels=after)
            return [*entries, inside(9, after), inside(3, across), inside(3, after), halved]
        pair = [inside(3, before)] * 2
        return [*entries, *pair, *pair, *[inside(1, before)] * 3]


AMOEBANET_MINI = AmoebaNetSpec(name="amoebanet-mini", image_size=8, num_classes=10, cells=(12, 12, 24, 24))
"""A model with both kinds of cells, small enough to train in milliseconds."""
DIGITS = {"amoebanet-digits": AMOEBANET_MINI}
