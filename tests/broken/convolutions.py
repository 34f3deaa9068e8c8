"""What goes wrong with a residual network alone. Mixins over engines."""

from __future__ import annotations

import torch
from torch import Tensor

from meshmark.adapter.data_parallel import PYTORCHS_CHECKPOINT
from meshmark.reference.model import Model
from meshmark.reference.resnet import ResidualBlock
from tests.broken.engine import Broken
from tests.broken.vision import NormalisesWholeRank


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


def _detached(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in inputs)
