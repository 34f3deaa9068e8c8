"""PipeMare's stages (arXiv:1910.05124)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from meshmark.adapter.engine import Holdings, RankContext
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.adapters.pipedream.engines import PipeDreamEngine, Weights
from meshmark.algorithms.pipedream import PipeMare
from meshmark.spec.case import Case


class PipeMareEngine(PipeDreamEngine):
    """PipeMare with a single version of the weights, which updates change in place.

    Backward passes find the newest weights in what forward passes saved, corrected while they run.
    """

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context)
        self.velocity = {name: torch.zeros_like(w).detach() for name, w in self.part.named_parameters()}
        self.newest: Weights = {}
        """While a backward pass runs, the weights without the correction."""
        self.steps_done = 0

    @property
    def delay(self) -> int:
        """Updates from a forward pass to its backward pass."""
        return 2 * self.stages_after + 1

    @property
    def most_in_flight(self) -> int:
        return self.delay

    def first_version(self) -> Weights:
        found = super().first_version().items()
        return {name: w.detach().clone().requires_grad_(w.requires_grad) for name, w in found}

    def version_of(self, micro_batch: int) -> int:
        return 0

    def forget(self, done: int) -> None:
        """Do nothing, because there is only one version."""

    def pass_back(self, micro_batch: int) -> None:
        self.newest = {name: w.detach().clone() for name, w in self.versions[0].items()}
        self.correct(micro_batch)
        super().pass_back(micro_batch)

    def correct(self, micro_batch: int) -> None:
        """Set the weights back to approximately those of the forward pass."""
        for name, w in self.versions[0].items():
            w.data.sub_(self.velocity[name], alpha=self.lateness(micro_batch))

    def lateness(self, micro_batch: int) -> int:
        """Return the number of updates since the forward pass of `micro_batch`."""
        return min(micro_batch, self.delay)

    @torch.no_grad()
    def step_on(self, gradients: Weights) -> None:
        (working,), rate = self.versions, self.rate()
        kept = self.case.workload.algorithm_as(PipeMare).discrepancy_decay ** (1 / self.delay)
        for name, w in working.items():
            w.data.copy_(self.newest[name])
        for name, gradient in gradients.items():
            working[name].data.sub_(gradient, alpha=rate)
            self.velocity[name].mul_(kept).sub_(gradient, alpha=(1 - kept) * rate)
        self.newest = {}
        self.keep(gradients)

    def rate(self) -> float:
        """Return this stage's learning rate in this step."""
        power = 1 - min(self.steps_done / self.case.workload.algorithm_as(PipeMare).annealing_steps, 1)
        return self.case.workload.optimizer.learning_rate / float(self.delay**power)

    def update(self) -> Tensor | None:
        self.steps_done += 1
        return super().update()

    def holdings(self) -> Holdings:
        held = super().holdings()
        return dataclasses.replace(held, optimizer_states=[*held.optimizer_states, *self.velocity.values()])

    def save(self, folder: Path) -> None:
        save_local(folder, {"velocity": self.velocity, "steps_done": self.steps_done})
        super().save(folder)

    def load(self, folder: Path) -> None:
        super().load(folder)
        own = load_local(folder, self.context.device)
        self.velocity, self.steps_done = own["velocity"], own["steps_done"]
