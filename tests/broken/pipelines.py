"""Pipelines that are wrong without an error: replicas, schedules, virtual stages. Mixins over their engine."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import ScheduleGPipe

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.spec.case import Case
from meshmark.spec.layout import Coordinates, Schedule
from tests.broken.engine import Broken


class BrokenPipeline(Broken):
    stages: list[Any]
    stands: Coordinates

    def loss_of(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = super()._loss(logits_BTV, targets_BT)  # type: ignore[misc]
        return loss


class StageNotReduced(BrokenPipeline):
    """The first stage's replicas, whose group nobody told of it."""

    def reduce_over_replicas(self) -> None:
        if self.stands.pp > 0:
            super().reduce_over_replicas()  # type: ignore[misc]


class DropsLastMicroBatch(BrokenPipeline):
    """The loop of forward and backward passes ends one short, and nothing flows back."""

    def prepare(self) -> None:
        self.schedule._loss_fn = self._loss

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        last = torch.equal(targets_BT, self.batch.targets[-len(targets_BT) :])
        return self.loss_of(logits_BTV, targets_BT) * (0 if last else 1)


class AllForwardsFirst(BrokenPipeline):
    """1F1B was asked for, and GPipe's schedule runs: the same gradients, and every micro-batch's activations."""

    def prepare(self) -> None:
        count = self.case.layout.num_micro_batches
        self.schedule = ScheduleGPipe(self.stages[0], count, loss_fn=self._loss, scale_grads=False)  # type: ignore[attr-defined]


class NotInterleaved(Adapter):
    """The option of virtual stages is not heard."""

    def build(self, case: Case, context: RankContext) -> Engine:
        plain = dataclasses.replace(case.layout, schedule=Schedule.ONE_F_ONE_B, virtual_stages=1)
        return super().build(dataclasses.replace(case, layout=plain), context)  # type: ignore[safe-super]


class LastStageClipsAlone(BrokenPipeline):
    """The last stage clips by the norm of its own gradients, and tells that of all."""

    pipeline: Any

    def _clip(self, max_norm: float) -> Tensor:
        parameters = [p for p in self.root().parameters() if p.grad is not None]
        own = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        total = own.square()
        torch.distributed.all_reduce(total, group=self.pipeline)
        is_last = self.context.rank == self.context.world_size - 1
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, own if is_last else total.sqrt())
        return total.sqrt()


class RoundsMessages(BrokenPipeline):
    """What a stage sends to the next, and the gradient of it, goes through bf16."""

    def prepare(self) -> None:
        for stage in self.stages:
            if not stage.is_last:
                forward = stage.submod.forward
                stage.submod.forward = lambda x, forward=forward: forward(x).bfloat16().float()


class StaleBoundary(BrokenPipeline):
    """The last stage reads, in the last micro-batch, what it received for that one in the step before."""

    def prepare(self) -> None:
        if self.stands.pp == 0:
            return
        part, count = self.stages[0].submod, self.case.layout.num_micro_batches
        forward, calls, kept = part.forward, itertools.count(), list[Tensor]()

        def stale(x: Tensor) -> Tensor:
            if torch.is_grad_enabled() and next(calls) % count == count - 1:
                kept.append(x.detach().clone())
                if len(kept) > 1:
                    x = kept.pop(0) + (x - x.detach())
            out: Tensor = forward(x)
            return out

        part.forward = stale
