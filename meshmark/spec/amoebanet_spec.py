"""What an AmoebaNet is: its dimensions and what follows from them. No torch, as in `model_spec`."""

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
class AmoebaNetSpec(Convolutional):
    """Dimensions of a net of AmoebaNet-D's cells (arXiv:1802.01548; the net that GPipe, arXiv:1811.06965, cuts): a
    convolution, cells that each read the states of the two before, the mean over pixels and a classifier; a batch norm
    behind every convolution. A cell that is wider than the one before it is a reduction cell: its images are half as
    high and wide.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "amoebanet"
    module: ClassVar[str] = "meshmark.reference.amoebanet:AmoebaNet"
    cells: tuple[int, ...]
    """Channels of one operation, cell by cell; the first convolution has those of the first."""
    init_std: float = 0.1

    def __post_init__(self) -> None:
        self.check_sizes(self.cells, sum(cell.reduces for cell in self.blocks) if self.cells else 0)
        if len(self.cells) > 1 and self.blocks[-1].reduces:
            raise InputError(
                f"model {self.name!r}: its last cell (widths {self.cells}) reduces, and nobody would read the state "
                "that it hands on; end with two cells of one width"
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
        """The first convolution and its norm, of which both states are; the classifier has no bias."""
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
    def family(self) -> Family:
        return Family.AMOEBANET

    @property
    def batch_norm(self) -> bool:
        """Over all pixels of the images of *one micro-batch of one replica*; see `VisionSpec.batch_norm`."""
        return True

    @property
    def widest(self) -> int:
        """Numbers at a position that a layer works on: the patches of a convolution laid out, or both states."""
        return max(9 * max(self.cells), *(cell.skip + cell.last for cell in self.blocks))


@dataclass(frozen=True, kw_only=True)
class CellSizes:
    """One cell."""

    skip: int
    """Channels of the state of the cell before the previous one."""
    last: int
    """Of the previous cell's."""
    width: int
    """Of one operation."""
    reduces: bool
    side: int
    """Pixels a side as images come in."""

    @property
    def next_side(self) -> int:
        return self.side // 2 if self.reduces else self.side

    @property
    def next_skip(self) -> int:
        """What the next cell finds as the one before: the previous state as it is, or halved to the new size."""
        return self.width if self.reduces else self.last

    @property
    def next_last(self) -> int:
        """Of the states inside, those that go out side by side."""
        return (3 if self.reduces else 4) * self.width

    @property
    def convolutions(self) -> list[Convolution]:
        """In the order of `meshmark.reference.amoebanet.Cell`."""
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
"""Cells of either kind; small enough for milliseconds."""
