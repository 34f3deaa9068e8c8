"""PipeDream-2BW's stages (arXiv:2006.09503)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from meshmark.adapter.engine import Holdings, RankContext
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.adapters.pipeline import PipelineEngine
from meshmark.reference.data import Batch
from meshmark.spec.case import Case


class TwoBufferedEngine(PipelineEngine):
    """`shadow`: the weights before those that the optimizer steps from; of them is every gradient."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context)
        self.shadow: list[Tensor] = [p.detach().clone() for p in self.model.parameters()]

    def backward(self, batch: Batch) -> Tensor:
        self.swap()
        loss = super().backward(batch)
        self.swap()
        return loss

    @torch.no_grad()
    def swap(self) -> None:
        for parameter, shadow in zip(self.model.parameters(), self.shadow, strict=True):
            now = parameter.clone()
            parameter.copy_(shadow)
            shadow.copy_(now)

    def update(self) -> Tensor | None:
        torch._foreach_copy_(self.shadow, [p.detach() for p in self.model.parameters()])
        return super().update()

    def holdings(self) -> Holdings:
        held = super().holdings()
        return dataclasses.replace(held, optimizer_states=[*held.optimizer_states, *self.shadow])

    def save(self, folder: Path) -> None:
        save_local(folder, {"shadow": self.shadow})
        super().save(folder)

    def load(self, folder: Path) -> None:
        super().load(folder)
        torch._foreach_copy_(self.shadow, load_local(folder, self.context.device)["shadow"])
