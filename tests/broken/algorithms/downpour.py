"""Downpour SGD whose server, replicas, or told order get one thing wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapters.downpour.server import Server
from tests.broken.engine import Broken
from tests.broken.mutant import of_algorithm


class Served(Broken):
    """`serving`: what is put before the server's class, where the server is."""

    serving: type
    server: Server | None
    gathered: list[Tensor]
    trained: list[Tensor]
    steps_done: int

    def prepare(self) -> None:
        if self.server:
            self.server.__class__ = type("BrokenServer", (self.serving, type(self.server)), {})


class _Serving(Server):
    """No server of its own: comes before one."""


class AppliesTwice(Served):
    class serving(_Serving):  # noqa: N801
        def apply(self, replica: int, gradients: list[Tensor]) -> None:
            super().apply(replica, gradients)
            super().apply(replica, gradients)


class LosesPushes(Served):
    class serving(_Serving):  # noqa: N801
        def apply(self, replica: int, gradients: list[Tensor]) -> None:
            if replica != 1:
                super().apply(replica, gradients)


class ServesOldCopy(Served):
    """The version that it tells is the newest."""

    class serving(_Serving):  # noqa: N801
        before: list[Tensor]

        def apply(self, replica: int, gradients: list[Tensor]) -> None:
            self.before = [w.detach().clone() for w in self.weights]
            super().apply(replica, gradients)

        def fetch(self, replica: int) -> tuple[int, list[Tensor]]:
            with self.turn:
                return self.version, self.before


class ForgetsSums(Served):
    class serving(_Serving):  # noqa: N801
        def apply(self, replica: int, gradients: list[Tensor]) -> None:
            for state in self.optimizer.state.values():
                state["sum"].zero_()
            super().apply(replica, gradients)


class TwiceTheRate(Served):
    class serving(_Serving):  # noqa: N801
        def apply(self, replica: int, gradients: list[Tensor]) -> None:
            self.optimizer.param_groups[0]["lr"] = 2 * self.spec.rate
            super().apply(replica, gradients)


class NeverWaits(Served):
    """And one replica is slow."""

    class serving(_Serving):  # noqa: N801
        def wait_for_the_slowest(self, replica: int) -> None:
            if replica == 1 and not self.pushes[1]:
                self.turn.wait_for(lambda: self.pushes[0] > 1, timeout=20)


class TellsAnotherOrder(Served):
    """The server reports the first two pushes in another order."""

    class serving(_Serving):  # noqa: N801
        def push(self, replica: int, gradients: list[Tensor]) -> int:
            made = super().push(replica, gradients)
            return {1: 2, 2: 1}.get(made, made)


class TellsOneVersionTwice(Served):
    class serving(_Serving):  # noqa: N801
        def push(self, replica: int, gradients: list[Tensor]) -> int:
            made = super().push(replica, gradients)
            return {2: 1}.get(made, made)


class Replica(Broken):
    gathered: list[Tensor]
    trained: list[Tensor]

    def push(self) -> int:
        made: int = super().push()  # type: ignore[misc]
        return made

    def gather(self) -> None:
        super().gather()  # type: ignore[misc]


class PushesOthers(Replica):
    """Gradients of the next replica."""

    def push(self) -> int:
        count, own = dist.get_world_size(), dist.get_rank()
        for x in self.gathered:
            every = [torch.empty_like(x) for _ in range(count)]
            dist.all_gather(every, x)
            x.copy_(every[(own + 1) % count])
        return super().push()


class PushesLate(Replica):
    """Push the gradients that the push before should have had."""

    kept: list[Tensor]

    def prepare(self) -> None:
        self.kept = [torch.zeros_like(x) for x in self.gathered]

    def push(self) -> int:
        for x, kept in zip(self.gathered, self.kept, strict=True):
            now = x.clone()
            x.copy_(kept)
            kept.copy_(now)
        return super().push()


class PushesLast(Replica):
    def gather(self) -> None:
        torch._foreach_zero_(self.gathered)
        super().gather()


class PushesAgain(Replica):
    """Gradients that were pushed are kept, and pushed again."""

    def push(self) -> int:
        kept = [x.clone() for x in self.gathered]
        made = super().push()
        torch._foreach_copy_(self.gathered, kept)
        return made


class TakesNothing(Replica):
    def fetch(self) -> int:
        own = [p.detach().clone() for p in self.trained]
        version: int = super().fetch()  # type: ignore[misc]
        torch._foreach_copy_(self.trained, own)
        return version


class StaysWhereItIs(Replica):
    """It does not step by itself."""

    def gather(self) -> None:
        super().gather()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0


class FetchesNever(Replica):
    def prepare(self) -> None:
        spec: Any = self.case.workload.algorithm.server

        class Never(type(spec)):  # type: ignore[misc]
            def fetches_after(self, step: int) -> bool:
                return False

        self.spec = Never(push_every=spec.push_every, fetch_every=spec.fetch_every, lead=spec.lead, rate=spec.rate)


_NAMED = {
    AppliesTwice: "the server applies every push twice",
    LosesPushes: "the pushes of replica 1 are lost",
    ServesOldCopy: "what is fetched is the version before the one that is told",
    ForgetsSums: "Adagrad's sums are forgotten",
    TwiceTheRate: "the server's rate is 2 times the right one",
    NeverWaits: "push of step 2 is 2 ahead of replica 1's, where the bound is 1",
    TellsAnotherOrder: "was applied before .*, though the order that is told is another",
    TellsOneVersionTwice: "push of step 0 is told to have made version 1, as is another's",
    PushesOthers: "each replica pushes the gradients of the next",
    PushesLate: "what is pushed is of the push before",
    PushesLast: "of the gradients between two pushes, the last alone is pushed",
    PushesAgain: "what was pushed is pushed again with the next",
    TakesNothing: "what is fetched is not taken",
    StaysWhereItIs: "replicas do not step by themselves|other multiple|0 times the right step",
    FetchesNever: "in step 2 it never fetches, where it is due",
}
MUTANTS = [*of_algorithm("downpour", "gpt-mini-sgd-downpour-p2f3l1", _NAMED)]
