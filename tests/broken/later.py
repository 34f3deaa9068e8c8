"""Wrong in one step, or from some step on: what a look at a single step does not show."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import all_reduce

from tests.broken.engine import Broken

LATE = 7
"""The first wrong step of a defect that a run of five steps does not reach."""


class ReducesAgainAtStep3(Broken):
    """A copy of every gradient is reduced once more, for nothing, in the fourth step alone."""

    def after_backward(self) -> None:
        if self.steps == 3:
            self.reduce_again()

    def reduce_again(self) -> None:
        for _, grad in self.grads():
            all_reduce(grad.clone())


class ReducesAgainAtFirst(ReducesAgainAtStep3):
    """The same in the first step alone, where frameworks send what they send once."""

    def after_backward(self) -> None:
        if self.steps == 0:
            self.reduce_again()


class TakesBufferAtStep3(Broken):
    """A tenth of what the weights, gradients and moments take, from the fourth step on."""

    buffer: Tensor

    def after_backward(self) -> None:
        if self.steps == 3:
            held = sum(tensor.numel() for tensor in self.locals())
            self.buffer = torch.zeros(4 * held // 10)


class LeaksOnOneRank(Broken):
    """A kibibyte more in every step, on the last rank."""

    leaked: list[Tensor]

    def prepare(self) -> None:
        self.leaked = []

    def after_backward(self) -> None:
        if self.context.rank == self.context.world_size - 1:
            self.leaked.append(torch.zeros(256))


class ScaledLate(Broken):
    """Gradients a thousandth too large, from the eighth step on."""

    def after_backward(self) -> None:
        if self.steps >= LATE:
            for _, grad in self.grads():
                grad.mul_(1.001)


class ReducesAgainLate(ReducesAgainAtStep3):
    """The same from the eighth step on."""

    def after_backward(self) -> None:
        if self.steps >= LATE:
            self.reduce_again()


class LeaksLate(LeaksOnOneRank):
    """A kibibyte more in every step, on the last rank, from the eighth step on."""

    def after_backward(self) -> None:
        if self.steps >= LATE:
            super().after_backward()
