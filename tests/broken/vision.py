"""Defects with images: weights by rank, and the statistics of batch norms. Mixins over engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshmark.reference.data import Batch
from tests.broken.engine import Broken
from tests.broken.gradients import MeanOfMicroBatches, MeanOfRanks


class MeanOfRanksOfImages(MeanOfRanks):
    """Each rank divides by its own number of images that count."""


class MeanOfMicroBatchesOfImages(MeanOfMicroBatches):
    """And each micro-batch."""


def _norms(engine: Broken) -> Iterator[nn.BatchNorm1d]:
    yield from (module for module in engine.modules() if isinstance(module, nn.BatchNorm1d))


class RankKeepsStatistics(Broken):
    """The second rank puts its running statistics back after every step."""

    def backward(self, batch: Batch) -> Tensor:
        before = [(buffer, buffer.clone()) for norm in _norms(self) for buffer in norm.buffers()]
        loss = super().backward(batch)
        if self.context.rank == 1:
            for buffer, value in before:
                buffer.copy_(value)
        return loss


class OtherMomentum(Broken):
    """Momentum as TensorFlow means it: what is kept, not what is new."""

    def prepare(self) -> None:
        for norm in _norms(self):
            norm.momentum = 0.9


class SharesStatistics(Broken):
    """DDP's default: every step starts with the first rank's statistics."""

    def prepare(self) -> None:
        self.module.broadcast_buffers = True


class RoundsStatistics(Broken):
    """Running statistics go through bf16."""

    def after_backward(self) -> None:
        for norm in _norms(self):
            for buffer in norm.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(buffer.bfloat16())


class NormalisesAsInEvaluation(Broken):
    """Batch norms stay in evaluation."""

    def prepare(self) -> None:
        for norm in _norms(self):
            norm.train = lambda mode=True: norm  # type: ignore[method-assign]  # noqa: B023
            norm.training = False


class NormalisesWholeRank(Broken):
    """All micro-batches of a rank are normalised together."""

    def forward(self, inputs: Tensor) -> Tensor:
        part = self.batch.shard(self.context.rank, self.case.layout.dp)
        start = next(i for i in range(len(part)) if torch.equal(part.inputs[i : i + len(inputs)], inputs))
        outputs: Tensor = super().forward(part.inputs)  # type: ignore[misc]
        return outputs[start : start + len(inputs)]
