"""Dropout that is too weak, too strong, or not random. Mixins over engines."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.models.transformer.module import Attention, Block
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from tests.broken.engine import Broken


class SameMasksOnRanks(Broken):
    """All ranks seed alike, by the step."""

    def backward(self, batch: Batch) -> Tensor:
        torch.manual_seed(self.steps)
        return super().backward(batch)


class SameMasksEveryStep(Broken):
    """The random state is put back after every step."""

    def backward(self, batch: Batch) -> Tensor:
        torch.manual_seed(self.context.rank)
        return super().backward(batch)


class SameMaskInOneModule(Broken):
    """On the last rank, the embedding draws the masks of the first step in every step, as of a random state that is not
    kept."""

    def prepare(self) -> None:
        if self.context.rank < self.context.world_size - 1:
            return
        first = next(module for module in self.modules() if isinstance(module, nn.Dropout))
        first.register_forward_hook(self.same)

    def same(self, module: nn.Dropout, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        if not module.training:
            return output
        draws = torch.Generator().manual_seed(self.context.rank)
        kept = torch.rand(inputs[0].shape, generator=draws) >= module.p
        return inputs[0] * kept / (1 - module.p)


class OtherProbability(Broken):
    """Dropout's probability is off by so much, relatively."""

    by = -0.5

    def prepare(self) -> None:
        p = self.case.workload.model.dropout * (1 + self.by)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = p
            if isinstance(module, Attention):
                module.dropout = p


class OnlyInAttention(Broken):
    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


class NotRescaled(Broken):
    """The blocks' outputs after dropout are not divided by 1 - p. (If the embedding's were not either, the whole
    residual stream would be smaller by one factor, which its norms undo: the same function.)"""

    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, Block):
                module.dropout.register_forward_hook(_shrink)


def _shrink(module: nn.Dropout, inputs: Any, output: Tensor) -> Tensor:  # noqa: ANN401
    return output * (1 - module.p) if module.training else output


class OnInEvaluation(Broken):
    """Nobody calls eval()."""

    def evaluate(self, batch: Batch) -> Tensor:
        root: Any = self.root()
        root.eval = lambda: root
        return super().evaluate(batch)


class OffInTraining(Broken):
    """Nobody calls train()."""

    def prepare(self) -> None:
        self.root().eval()


class StaysInEvaluation(Broken):
    """Nobody calls train() again after an evaluation."""

    def evaluate(self, batch: Batch) -> Tensor:
        share = super().evaluate(batch)
        self.root().eval()
        return share


class DropoutForgotten(Adapter):
    """The option is not passed on."""

    def build(self, case: Case, context: RankContext) -> Engine:
        model = dataclasses.replace(case.workload.model, dropout=0.0)
        other = dataclasses.replace(case, workload=dataclasses.replace(case.workload, model=model))
        return super().build(other, context)  # type: ignore[safe-super]


class EvaluatesFirstRows(Broken):
    """Every rank evaluates the first one's rows."""

    evaluating = False

    @property
    def dp_rank(self) -> int:
        return 0 if self.evaluating else super().dp_rank  # type: ignore[misc]

    def evaluate(self, batch: Batch) -> Tensor:
        self.evaluating = True
        share = super().evaluate(batch)
        self.evaluating = False
        return share


class EvaluatesPart(Broken):
    """The last sequence of the batch is left out: it does not fill a batch of evaluation."""

    def evaluate(self, batch: Batch) -> Tensor:
        targets = batch.targets.clone()
        targets[-1] = -100
        return super().evaluate(dataclasses.replace(batch, targets=targets))


class TellsOwnEvaluation(Broken):
    """Each rank's mean, summed."""

    def evaluate(self, batch: Batch) -> Tensor:
        return super().evaluate(batch) * self.context.world_size


class EvaluationLeavesGradients(Broken):
    """Evaluation goes backward, and nobody clears what it leaves."""

    def evaluate(self, batch: Batch) -> Tensor:
        return super().backward(batch).detach()


class EvaluationSteps(Broken):
    """Evaluation trains."""

    def evaluate(self, batch: Batch) -> Tensor:
        share = super().backward(batch).detach()
        super().update()
        return share
