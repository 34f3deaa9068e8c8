"""DiLoCo that meets at another time, or steps on something else where it does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.broken.engine import Broken
from tests.broken.mutant import of_algorithm


class Outer(Broken):
    outer: torch.optim.SGD
    met: list[Tensor]
    trained: list[Tensor]
    spec: Any

    def meet(self) -> None:
        super().meet()  # type: ignore[misc]


class OuterMomentumReset(Outer):
    def meet(self) -> None:
        self.outer.state.clear()
        super().meet()


class NoOuterStep(Outer):
    @torch.no_grad()
    def meet(self) -> None:
        for own, there in zip(self.trained, self.met, strict=True):
            dist.all_reduce(own)
            there.copy_(own.div_(dist.get_world_size()))


class OuterHeavyBall(Outer):
    def prepare(self) -> None:
        for group in self.outer.param_groups:
            group["nesterov"] = False


class MeetsLate(Outer):
    """By a step."""

    due = False

    def meet(self) -> None:
        self.due = True

    def update(self) -> Tensor | None:
        late, self.due = self.due, False
        norm = super().update()
        if late:
            super().meet()
        return norm


class OuterAlone(Outer):
    """On its own drift."""

    @torch.no_grad()
    def meet(self) -> None:
        for there, own in zip(self.met, self.trained, strict=True):
            there.grad = there - own
        self.outer.step()
        torch._foreach_copy_(self.trained, self.met)


_NAMED = {
    OuterMomentumReset: "the outer momentum is reset",
    NoOuterStep: "parameters are averaged, and no outer step is taken",
    OuterHeavyBall: "the outer momentum is not Nesterov's",
    MeetsLate: "replicas meet a step late",
    OuterAlone: "each replica steps on its own drift",
}
MUTANTS = [*of_algorithm("diloco", "gpt-mini-sgd-diloco2", _NAMED)]
