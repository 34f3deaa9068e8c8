"""Engines of algorithms that compress, one each, after the equations of `meshmark.algorithms.compressed.transition`.

They share no code with these but what is drawn: gradients are PyTorch's tensors, and what others know of them comes by
message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import DataParallelEngine, Holdings, RankContext
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.adapters.compressed.codecs import Votes
from meshmark.adapters.compressed.exchange import Exchange, Gathered, exchange_of
from meshmark.algorithms.compressed import Compressing
from meshmark.spec.case import Case


class CompressedEngine(DataParallelEngine):
    """Until the update, gradients are the replica's own."""

    optimizer: torch.optim.Optimizer

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.algorithm = case.workload.algorithm_as(Compressing)
        self.exchange = self.make_exchange()
        self.steps_done = 0
        self.kept: dict[str, dict[str, Tensor]] = {}
        """Vectors that the algorithm keeps, by name, then by trained parameter."""

    def make_exchange(self) -> Exchange:
        compressor = self.algorithm.compressor
        assert compressor is not None
        return exchange_of(compressor, self.case.workload.seed)

    @torch.no_grad()
    def update(self) -> Tensor | None:
        trained = {name: p for name, p in self.named_parameters() if p.grad is not None}
        direction = self.direction({name: p.grad for name, p in trained.items() if p.grad is not None})
        for name, parameter in trained.items():
            parameter.grad = direction[name]
        self.steps_done += 1
        return super().update()

    def direction(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the direction in which all replicas step."""
        return self.exchange.meet(own, self.steps_done).mean()

    def holdings(self) -> Holdings:
        held = super().holdings()
        states = [*held.optimizer_states, *(t for tensors in self.kept.values() for t in tensors.values())]
        return Holdings(parameters=held.parameters, gradients=held.gradients, optimizer_states=states)

    def save(self, folder: Path) -> None:
        """Save this rank's state. What is yet to be sent differs between ranks."""
        save_local(folder, self.state())

    def load(self, folder: Path) -> None:
        self.load_state(load_local(folder))

    def state(self) -> dict[str, Any]:
        return super().state() | {"steps": self.steps_done, "kept": self.kept}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steps_done, kept = state["steps"], state["kept"]
        self.kept = {what: {n: x.to(self.context.device) for n, x in t.items()} for what, t in kept.items()}


class ErrorFeedbackEngine(CompressedEngine):
    """`kept["left"]`: what was not sent."""

    def direction(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        wanted = list(own.values())
        if self.kept:
            torch._foreach_add_(wanted, list(self.kept.pop("left").values()))
        told = self.exchange.meet(own, self.steps_done)
        torch._foreach_sub_(wanted, list(told.local().values()))
        self.kept = {"left": own}
        return told.mean()


class EF21Engine(CompressedEngine):
    """`kept["own"]`: what all know of this replica's gradient; `kept["mean"]`: of all."""

    def direction(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.kept:
            self.kept = {what: {name: torch.zeros_like(x) for name, x in own.items()} for what in ("own", "mean")}
        changed = list(own.values())
        torch._foreach_sub_(changed, list(self.kept["own"].values()))
        told = self.exchange.meet(own, self.steps_done)
        torch._foreach_add_(list(self.kept["own"].values()), list(told.local().values()))
        torch._foreach_add_(list(self.kept["mean"].values()), list(told.mean().values()))
        return {name: x.clone() for name, x in self.kept["mean"].items()}


class MajorityVoteEngine(CompressedEngine):
    votes: Gathered

    def make_exchange(self) -> Exchange:
        self.votes = Gathered(Votes(None), self.case.workload.seed)
        return self.votes

    def direction(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.sign_() for name, x in self.votes.meet(own, self.steps_done).total().items()}
