"""DiLoCo (arXiv:2311.08105): one optimizer per replica, and PyTorch's Nesterov SGD on their average change."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import (
    DataParallelEngine,
    Engine,
    Holdings,
    RankContext,
    initial_model,
    optimizer_state_tensors,
)
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.algorithms.local_sgd import DiLoCo as DiLoCoAlgorithm
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision


class DiLoCoEngine(DataParallelEngine):
    """The optimizer `outer` steps on `met`, the parameters that all replicas last had in common."""

    optimizer: torch.optim.Optimizer

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.spec, self.steps_done = case.workload.algorithm_as(DiLoCoAlgorithm), 0
        self.trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.met: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in self.trained]
        rate, momentum = self.spec.outer_rate, self.spec.outer_momentum
        self.outer = torch.optim.SGD(self.met, lr=rate, momentum=momentum, nesterov=momentum > 0)

    def update(self) -> Tensor | None:
        norm = super().update()
        due = self.spec.averages_after(self.steps_done)
        self.steps_done += 1
        if due:
            self.meet()
        return norm

    @torch.no_grad()
    def meet(self) -> None:
        for there, own in zip(self.met, self.trained, strict=True):
            there.grad = there - own
            dist.all_reduce(there.grad)
            there.grad.div_(dist.get_world_size())
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)
        torch._foreach_copy_(self.trained, self.met)

    def holdings(self) -> Holdings:
        held = super().holdings()
        kept = [there.detach() for there in self.met] + optimizer_state_tensors(self.outer)
        states = [*held.optimizer_states, *kept]
        return Holdings(parameters=held.parameters, gradients=held.gradients, optimizer_states=states)

    def save(self, folder: Path) -> None:
        """Every rank holds a replica of its own."""
        save_local(folder, self.state())

    def load(self, folder: Path) -> None:
        self.load_state(load_local(folder))

    def state(self) -> dict[str, Any]:
        outer = {"steps": self.steps_done, "met": self.met, "outer": self.outer.state_dict()}
        return super().state() | outer

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steps_done = state["steps"]
        for there, saved in zip(self.met, state["met"], strict=True):
            there.copy_(saved)
        self.outer.load_state_dict(state["outer"])


class DiLoCo(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=TEXT_FAMILIES | {Family.OWN},
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        algorithms=frozenset({DiLoCoAlgorithm.kind}),
        lacks={
            Precision.BF16_REDUCE_BF16: "the rounding of averaged parameters is not in the noise that judges it",
            Precision.FP16: "a replica that skips an overflowing step would be averaged with those that did not",
            Feature.UNUSED: "a parameter that a step leaves out has drifted otherwise on each replica",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.RESHARD: "the replicas of another world size are other ones",
        },
    )

    def build(self, case: Case, context: RankContext) -> Engine:
        module = initial_model(case, context.device)
        optimizer = build_optimizer(case.workload.optimizer, module.named_parameters())
        return DiLoCoEngine(case, context, module, optimizer)
