"""Elastic averaging SGD over all-reduces of `torch.distributed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import DataParallelEngine, Engine, Holdings, RankContext, initial_model
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark_easgd.algorithm import EASGD


class ElasticEngine(DataParallelEngine):
    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.algorithm, self.steps_done = case.workload.algorithm_as(EASGD), 0
        self.trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.center = [p.detach().clone() for p in self.trained]

    def update(self) -> Tensor | None:
        norm = super().update()
        if self.algorithm.averages_after(self.steps_done):
            self.meet()
        self.steps_done += 1
        return norm

    @torch.no_grad()
    def meet(self) -> None:
        for center, parameter in zip(self.center, self.trained, strict=True):
            distance = (parameter - center).mul_(self.algorithm.moving_rate)
            parameter.sub_(distance)
            dist.all_reduce(distance)
            center.add_(distance)

    def holdings(self) -> Holdings:
        held = super().holdings()
        states = [*held.optimizer_states, *self.center]
        return Holdings(parameters=held.parameters, gradients=held.gradients, optimizer_states=states)

    def save(self, folder: Path) -> None:
        """Every rank saves the replica that it holds."""
        save_local(folder, self.state())

    def load(self, folder: Path) -> None:
        self.load_state(load_local(folder))

    def state(self) -> dict[str, Any]:
        return super().state() | {"steps": self.steps_done, "center": self.center}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steps_done = state["steps"]
        for center, saved in zip(self.center, state["center"], strict=True):
            center.copy_(saved)


class ElasticAveraging(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        algorithms=frozenset({EASGD.kind}),
        lacks={
            Feature.UNUSED: "a parameter that a step leaves out has drifted otherwise on each replica",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.RESHARD: "the replicas of another world size are other ones",
        },
    )

    def build(self, case: Case, context: RankContext) -> Engine:
        module = initial_model(case, context.device)
        optimizer = build_optimizer(case.workload.optimizer, module.named_parameters())
        return ElasticEngine(case, context, module, optimizer)
