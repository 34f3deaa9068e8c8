"""Engines of decentralised algorithms, one each, written from the equations of `meshmark.algorithms`.

They share only the graph with that code. States are PyTorch's tensors, and other ranks' values come in messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import DataParallelEngine, Holdings, RankContext
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.adapters.decentralised.exchange import Exchange
from meshmark.algorithms import decentralised
from meshmark.reference.data import Batch
from meshmark.spec.case import Case


class DSGDEngine(DataParallelEngine):
    """Step, then mix."""

    optimizer: torch.optim.Optimizer

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.graph = case.workload.algorithm_as(decentralised.Decentralised).graph
        self.trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.steps_done = 0
        self.kept: dict[str, list[Tensor]] = {}
        """Tensors that the algorithm keeps for every trained parameter, by name."""

    def update(self) -> Tensor | None:
        norm = self.train()
        self.steps_done += 1
        return norm

    @torch.no_grad()
    def train(self) -> Tensor | None:
        norm = super().update()
        self.put(self.exchange(self.trained).mixed())
        return norm

    def exchange(self, tensors: Sequence[Tensor]) -> Exchange:
        return Exchange(self.graph, self.steps_done, tensors)

    def put(self, values: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self.trained, list(values))

    def gradient_list(self) -> list[Tensor]:
        """Return the gradients of the trained parameters, each of which has one."""
        return [p.grad for p in self.trained if p.grad is not None]

    def holdings(self) -> Holdings:
        held = super().holdings()
        states = [*held.optimizer_states, *(t for tensors in self.kept.values() for t in tensors)]
        return Holdings(parameters=held.parameters, gradients=held.gradients, optimizer_states=states)

    def save(self, folder: Path) -> None:
        """Every rank holds a replica of its own."""
        save_local(folder, self.state())

    def load(self, folder: Path) -> None:
        """Load the state through the host, where the optimizer's counts of steps stay, as in
        `DataParallelEngine.load`.
        """
        self.load_state(load_local(folder, torch.device("cpu")))

    def state(self) -> dict[str, Any]:
        return super().state() | {"steps": self.steps_done, "kept": self.kept}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steps_done = state["steps"]
        self.kept = {name: [t.to(self.context.device) for t in tensors] for name, tensors in state["kept"].items()}


class DPSGDEngine(DSGDEngine):
    """States are on their way while the gradient is computed."""

    on_its_way: Exchange

    def backward(self, batch: Batch) -> Tensor:
        self.on_its_way = self.exchange(self.trained)
        return super().backward(batch)

    @torch.no_grad()
    def train(self) -> Tensor | None:
        moved = [p.clone() for p in self.trained]
        norm = DataParallelEngine.update(self)
        torch._foreach_sub_(moved, self.trained)
        mixed = self.on_its_way.mixed()
        torch._foreach_sub_(mixed, moved)
        self.put(mixed)
        del self.on_its_way
        return norm


class DMSGDEngine(DSGDEngine):
    """`kept["momentum"]` is mixed with the parameters, in one message."""

    @torch.no_grad()
    def train(self) -> Tensor | None:
        ahead = self.gradient_list()
        if self.kept:
            torch._foreach_add_(ahead, self.kept.pop("momentum"), alpha=self.case.workload.optimizer.momentum)
        norm = DataParallelEngine.update(self)
        mixed = self.exchange([*self.trained, *ahead]).mixed()
        self.put(mixed[: len(ahead)])
        torch._foreach_copy_(ahead, mixed[len(ahead) :])
        self.kept["momentum"] = ahead
        return norm


class QuasiGlobalEngine(DSGDEngine):
    """`kept["momentum"]` follows what steps come to after mixing."""

    @torch.no_grad()
    def train(self) -> Tensor | None:
        options, momentum = self.case.workload.optimizer, self.kept.get("momentum")
        if momentum:
            torch._foreach_add_(self.gradient_list(), momentum, alpha=options.momentum)
        moved = [p.clone() for p in self.trained]
        norm = super().train()
        torch._foreach_sub_(moved, self.trained)
        torch._foreach_mul_(moved, (1 - options.momentum) / options.learning_rate)
        if momentum:
            torch._foreach_add_(moved, momentum, alpha=options.momentum)
        self.kept["momentum"] = moved
        return norm


class GradientTrackingEngine(DSGDEngine):
    """`kept["tracked"]` and the parameters go in one message; `kept["last"]` are the gradients of the step before."""

    @torch.no_grad()
    def train(self) -> Tensor | None:
        own, tracked = self.gradient_list(), self.kept.get("tracked")
        if tracked:
            mixed = self.exchange([*self.trained, *tracked]).mixed()
            torch._foreach_copy_(tracked, mixed[len(own) :])
            torch._foreach_add_(tracked, own)
            torch._foreach_sub_(tracked, self.kept["last"])
        else:
            mixed = self.exchange(self.trained).mixed()
            tracked = [gradient.clone() for gradient in own]
        self.kept = {"tracked": tracked, "last": own}
        for parameter, gradient in zip(self.trained, tracked, strict=True):
            parameter.grad = gradient
        moved = [p.clone() for p in self.trained]
        norm = DataParallelEngine.update(self)
        torch._foreach_sub_(moved, self.trained)
        there = mixed[: len(own)]
        torch._foreach_sub_(there, moved)
        self.put(there)
        return norm


class ExactDiffusionEngine(DSGDEngine):
    """`kept["before"]` is the result of the step before, without mixing. Received values count half."""

    @torch.no_grad()
    def train(self) -> Tensor | None:
        moved = self.kept.pop("before", None)
        if moved:
            torch._foreach_sub_(moved, self.trained)
        norm = DataParallelEngine.update(self)
        alone = [p.clone() for p in self.trained]
        if moved:
            torch._foreach_sub_(self.trained, moved)
        exchange = self.exchange(self.trained)
        halved = {j: (weight + (j == exchange.rank)) / 2 for j, weight in exchange.weights.items()}
        self.put(exchange.mixed(halved))
        self.kept["before"] = alone
        return norm


ENGINES: dict[str, type[DSGDEngine]] = {
    decentralised.DSGD.kind: DSGDEngine,
    decentralised.DPSGD.kind: DPSGDEngine,
    decentralised.DmSGD.kind: DMSGDEngine,
    decentralised.QuasiGlobal.kind: QuasiGlobalEngine,
    decentralised.GradientTracking.kind: GradientTrackingEngine,
    decentralised.ExactDiffusion.kind: ExactDiffusionEngine,
}
