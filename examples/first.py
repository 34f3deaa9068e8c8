"""Data parallelism by hand: every rank holds the whole model, and gradients are averaged tensor by tensor."""

from typing import ClassVar

import torch

from meshmark.adapter.contract import Adapter, Capabilities
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext, initial_model
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case


class FirstEngine(DataParallelEngine):
    def finish_gradients(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.context.world_size
        super().finish_gradients()


class First(Adapter):
    capabilities: ClassVar = Capabilities(degrees=frozenset({"dp"}))

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, context.device)
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters())
        return FirstEngine(case, context, model, optimizer)
