"""A plain script's loop under DDP, in the shape of nanoGPT's train.py: the smallest `Loop`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.contract import Capabilities, Feature, Requirement, Track
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, Dealing, Loop, LoopEngine, collate
from meshmark.adapters.ddp import DDPRecommended
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer, build_schedule, loss_share
from meshmark.spec.case import Case
from meshmark.spec.workload import Loss


class ScriptLoop(Loop):
    """The loss of a micro-batch is the mean over its own targets, divided by the number of micro-batches."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context, Dealing.MICRO_BATCHES)

    def run(self, checkpoint: Path | None) -> None:
        spec, layout, device = self.case.workload.optimizer, self.case.layout, self.context.device
        model = DistributedDataParallel(initial_model(self.case, device), broadcast_buffers=False)
        optimizer = build_optimizer(spec, model.module.named_parameters())
        schedule = build_schedule(spec, optimizer)
        self.ready(model, optimizer)
        for step in itertools.count():
            total = torch.zeros((), device=device)
            for micro in range(layout.num_micro_batches):
                first = step * self.case.workload.global_batch
                first += (micro * layout.dp + self.context.rank) * self.rows_per_micro_batch
                rows = collate([self.rows[first + row] for row in range(self.rows_per_micro_batch)]).to(device)
                model.require_backward_grad_sync = micro == layout.num_micro_batches - 1
                share = loss_share(model(rows.inputs), rows, self.case.workload.loss)
                loss = share * rows.total_weight / rows.weights.sum() / layout.num_micro_batches
                torch.autograd.backward(loss)
                total += loss.detach()
            self.gradients_complete(total / layout.dp)
            norm = None if spec.clip_norm is None else nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if schedule:
                schedule.step()
            self.step_done(norm)


class PlainLoop(DDPRecommended):
    """A script as nanoGPT's: means of micro-batches, under plain DDP."""

    track: ClassVar = Track.THEORY
    requires: ClassVar[tuple[Requirement, ...]] = (GREENLET,)
    broadcasts_buffers: ClassVar[bool] = False
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        lacks={
            **LOOP_LACKS,
            Feature.SAVE: "this script saves nothing",
            Feature.UNUSED: "DDP is not told of parameters that a step does not use",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.loss is Loss.OWN:
            return f"{case.adapter} does not support a user's own loss, of which it knows no mean"
        return super().supports(case, device, backend)

    def build(self, case: Case, context: RankContext) -> Engine:
        return LoopEngine(case, context, ScriptLoop(case, context))
