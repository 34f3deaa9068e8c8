"""Defects that only nets of convolutions have. Mixins over engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from meshmark.adapter.engine import PYTORCHS_CHECKPOINT
from meshmark.models.amoebanet.module import Cell
from meshmark.models.coatnet.module import Bottleneck, RelativeAttention
from meshmark.models.module import Model
from meshmark.models.resnet.module import ResidualBlock
from meshmark.models.vision_transformer.module import BatchNorm
from meshmark.reference.data import Batch
from tests.broken.engine import Broken
from tests.broken.vision import NormalisesWholeRank, RankKeepsStatistics, SharesStatistics

_M = TypeVar("_M", bound=torch.nn.Module)


class ComputesAgain(Broken):
    """Blocks are computed again in the backward pass, where nobody asked for it."""

    def prepare(self) -> None:
        for part in self.modules():
            if isinstance(part, Model):
                part.recompute = PYTORCHS_CHECKPOINT


class NormalisesWholeRankOfConvolutions(NormalisesWholeRank):
    """All micro-batches of a rank are normalised together."""


class ShortcutsDetached(Broken):
    """Nothing flows back through a shortcut."""

    def prepare(self) -> None:
        for part in self.modules():
            if isinstance(part, ResidualBlock):
                part.shortcut.register_forward_pre_hook(_detached)


def _each(engine: Broken, kind: type[_M]) -> Iterator[_M]:
    yield from (module for module in engine.modules() if isinstance(module, kind))


class OtherSideOfPositions(Broken):
    """The bias of relative positions is that of the other direction: rows of its table run backward."""

    def prepare(self) -> None:
        for attention in _each(self, RelativeAttention):
            attention.offsets = _transposed(attention)  # type: ignore[method-assign]


def _transposed(attention: RelativeAttention) -> Callable[[torch.device], Tensor]:
    right = attention.offsets
    return lambda device: right(device).T


class HeadsShareBias(Broken):
    """Every head adds the first one's bias of relative positions."""

    def prepare(self) -> None:
        for attention in _each(self, RelativeAttention):
            attention.bias = _of_first_head(attention)  # type: ignore[method-assign]


def _of_first_head(attention: RelativeAttention) -> Callable[[torch.device], Tensor]:
    right = attention.bias
    return lambda device: right(device)[:1]


class PositionsNotUpdated(Broken):
    """The bias of relative positions is taken for a buffer, as frameworks do that keep a table beside its index."""

    def backward(self, batch: Batch) -> Tensor:
        loss = super().backward(batch)
        for attention in _each(self, RelativeAttention):
            attention.positions.weight.grad = None
        return loss


class NeighbouringGroups(Broken):
    """Depthwise convolutions hand every channel to its neighbour's filter."""

    def prepare(self) -> None:
        for bottleneck in _each(self, Bottleneck):
            bottleneck.depthwise.register_forward_pre_hook(_rolled)


def _rolled(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.roll(1, dims=1) for x in inputs)


class SkipsToTheOtherCell(Broken):
    """Cells take the previous state for the one before it, and the other way round, where both are as wide."""

    def prepare(self) -> None:
        for cell in _each(self, Cell):
            if cell.skip == cell.from_last.convolution.in_channels:
                cell.states = _swapped(cell)  # type: ignore[method-assign]


def _swapped(cell: Cell) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    right = cell.states

    def states(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        skip_BCHW, last_BCHW = right(x_BCHW)
        return last_BCHW, skip_BCHW

    return states


class InfersOnStages(Broken):
    """Every stage runs once more before the first step, to find out what it makes, as PyTorch's pipelining does by
    default: its batch norms count that."""

    def prepare(self) -> None:
        self.runs_before = True

    def backward(self, batch: Batch) -> Tensor:
        if self.runs_before and self.case.workload.model.batch_norm:
            self.runs_before = False
            for norm in _each(self, BatchNorm):
                norm(torch.ones(4, norm.num_features))
        return super().backward(batch)


class SharesStatisticsOfConvolutions(SharesStatistics):
    """DDP's default: every step starts with the first rank's statistics."""


class KeepsStatisticsOfConvolutions(RankKeepsStatistics):
    """The second rank puts its running statistics back after every step."""


def _detached(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in inputs)
