"""Engines that train on data of the wrong place: another micro-batch's, rank's or step's."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from meshmark.reference.data import Batch, make_batch
from tests.broken.engine import Broken


class _OtherData(Broken):
    """Takes rows of the global batch, [dp, num_micro_batches, rows], in another order on some ranks."""

    last_rank_alone = True

    def other(self, batch: Batch, places: Tensor) -> Batch:
        """Return the batch to train on, of which `places` are the rows' positions."""
        raise NotImplementedError

    def backward(self, batch: Batch) -> Tensor:
        if self.last_rank_alone and self.context.rank != self.context.world_size - 1:
            return super().backward(batch)
        layout = self.case.layout
        places = torch.arange(len(batch)).view(layout.dp, layout.num_micro_batches, -1)
        return super().backward(self.other(batch, places))


class TargetsOfNextMicroBatch(_OtherData):
    """On the last rank, the second micro-batch has the targets of the third."""

    def other(self, batch: Batch, places: Tensor) -> Batch:
        places[:, 1] = places[:, 2]
        return dataclasses.replace(batch.take(places.flatten()), inputs=batch.inputs)


class TwoExchangeTargets(_OtherData):
    """On the last rank, the second and the third micro-batch have each other's targets."""

    def other(self, batch: Batch, places: Tensor) -> Batch:
        order = places[:, [0, 2, 1, *range(3, places.shape[1])]]
        return dataclasses.replace(batch.take(order.flatten()), inputs=batch.inputs)


class InputsOfMicroBatchBefore(_OtherData):
    """On all ranks, the last micro-batch has the inputs of the one before, as a buffer that is written too early."""

    last_rank_alone = False

    def other(self, batch: Batch, places: Tensor) -> Batch:
        places[:, -1] = places[:, -2].clone()
        return dataclasses.replace(batch, inputs=batch.inputs[places.flatten()])


class TargetsOfOtherRank(_OtherData):
    """The last rank has the first rank's targets."""

    def other(self, batch: Batch, places: Tensor) -> Batch:
        return dataclasses.replace(batch.take(places.flip(0).flatten()), inputs=batch.inputs)


class StaleMicroBatch(_OtherData):
    """On all ranks, the third micro-batch is that of the step before."""

    last_rank_alone = False

    def other(self, batch: Batch, places: Tensor) -> Batch:
        before = make_batch(self.case.workload, max(self.steps - 1, 0))
        rows = places[:, 2].flatten()
        inputs, targets, weights = batch.inputs.clone(), batch.targets.clone(), batch.weights.clone()
        inputs[rows], targets[rows], weights[rows] = before.inputs[rows], before.targets[rows], before.weights[rows]
        return dataclasses.replace(batch, inputs=inputs, targets=targets, weights=weights)


class StaleInputs(_OtherData):
    """On the last rank, the inputs are those of the step before."""

    def other(self, batch: Batch, places: Tensor) -> Batch:
        return dataclasses.replace(batch, inputs=make_batch(self.case.workload, max(self.steps - 1, 0)).inputs)
