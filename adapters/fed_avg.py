"""FedAvg (arXiv:1602.05629): replicas have different numbers of rows, which weight the average of parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext, initial_model
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.algorithms.local_sgd import FedAvg as FedAvgAlgorithm
from meshmark.algorithms.local_sgd.client_shares import client_shares
from meshmark.algorithms.local_sgd.transition import client_rows
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.recipe import TrainingRecipe


class FedAvgEngine(DataParallelEngine):
    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.weight, self.steps_done = float(client_shares(case.layout.dp)[self.dp_rank]), 0

    def part(self, batch: Batch) -> Batch:
        return client_rows(batch, self.dp_rank, self.case.layout.dp)

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate `loss`, which assumes equal shares of rows, after scaling it to this replica's share."""
        super().differentiate(loss / (self.case.layout.dp * self.weight))

    def update(self) -> Tensor | None:
        norm = super().update()
        if self.case.workload.algorithm.averages_after(self.steps_done):
            self.average()
        self.steps_done += 1
        return norm

    @torch.no_grad()
    def average(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.mul_(self.weight))

    def save(self, folder: Path) -> None:
        """Every rank holds a replica of its own."""
        save_local(folder, self.state())

    def load(self, folder: Path) -> None:
        self.load_state(load_local(folder))

    def state(self) -> dict[str, Any]:
        return super().state() | {"steps": self.steps_done}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steps_done = state["steps"]


class FedAvg(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=TEXT_FAMILIES | {Family.OWN},
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        algorithms=frozenset({FedAvgAlgorithm.kind}),
        lacks={
            Precision.BF16: "its gradients would be held against a twin of equal parts",
            Precision.FP16: "a replica that skips an overflowing step would be averaged with those that did not",
            Feature.UNUSED: "a parameter that a step leaves out has drifted otherwise on each replica",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.RESHARD: "the replicas of another world size are other ones",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """Return why the case is not supported: the smallest share of rows must be divisible into micro-batches."""
        layout, rows = case.layout, case.workload.global_batch
        for replica, share in enumerate(client_shares(layout.dp)):
            if (rows * share / layout.num_micro_batches).denominator > 1:
                return (
                    f"replica {replica} has {share} of {rows} rows, which makes no {layout.num_micro_batches} equal "
                    "micro-batches of whole rows; take a larger global batch, or fewer micro-batches"
                )
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return the recipe without a plan of activations, which theory has for equal shares of rows only."""
        return dataclasses.replace(super().recipe(case), activations_known=False)

    def build(self, case: Case, context: RankContext) -> Engine:
        module = initial_model(case, context.device)
        optimizer = build_optimizer(case.workload.optimizer, module.named_parameters())
        return FedAvgEngine(case, context, module, optimizer)
