"""Decentralised training that mixes otherwise, or something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshmark.adapter.engine import DataParallelEngine
from meshmark.adapters.decentralised.engines import DSGDEngine
from meshmark.adapters.decentralised.exchange import Exchange
from meshmark.algorithms.decentralised.graph import Graph
from meshmark.spec.layout import Layout
from tests.broken.engine import Broken
from tests.broken.mutant import of_algorithm


class Mixing(Broken):
    """Puts another exchange in the place of the engine's, or changes what it keeps."""

    graph: Graph
    steps_done: int
    kept: dict[str, list[Tensor]]
    trained: list[Tensor]
    exchanged: type[Exchange] = Exchange

    def exchange(self, tensors: Sequence[Tensor]) -> Exchange:
        return self.exchanged(self.graph, self.steps_done, tensors)


class _Alone(Exchange):
    def mixed(self, weights: Mapping[int, float] | None = None) -> list[Tensor]:
        return super().mixed({j: float(j == self.rank) for j in self.weights})


class NeverMixes(Mixing):
    """Its own copy, in the place of each neighbour's too."""

    exchanged = _Alone


class _SelfTwice(Exchange):
    def mixed(self, weights: Mapping[int, float] | None = None) -> list[Tensor]:
        chosen = dict(weights or self.weights)
        chosen[self.rank] *= 1.01
        return super().mixed(chosen)


class SelfWeightWrong(Mixing):
    """By a hundredth, and so the row's sum."""

    exchanged = _SelfTwice


class _RowStochastic(Exchange):
    def mixed(self, weights: Mapping[int, float] | None = None) -> list[Tensor]:
        chosen = dict(weights or self.weights)
        moved = 0.5 * chosen[self.rank] if self.rank == 0 else 0.0
        others = [j for j in chosen if j != self.rank]
        chosen[self.rank] -= moved
        return super().mixed(chosen | {j: chosen[j] + moved / len(others) for j in others})


class RowStochastic(Mixing):
    """Rows sum to one, and columns do not: replica 0 counts for less."""

    exchanged = _RowStochastic


class StaleNeighbours(Mixing):
    """Values of neighbours are mixed in one step late."""

    heard: dict[int, Tensor]

    def exchange(self, tensors: Sequence[Tensor]) -> Exchange:
        exchange = super().exchange(tensors)
        for work in exchange.works:
            work.wait()
        exchange.works, now = [], exchange.heard
        before = getattr(self, "heard", {})
        same = {j for j, there in now.items() if j in before and before[j].shape == there.shape}
        exchange.heard = {j: before[j] if j in same else exchange.own.clone() for j in now}
        self.heard = now
        return exchange


class MixesLate(Mixing):
    """By the graph of the step before."""

    def exchange(self, tensors: Sequence[Tensor]) -> Exchange:
        return Exchange(self.graph, max(self.steps_done - 1, 0), tensors)


class MixesFirst(Mixing):
    """Before the step, not after it."""

    def train(self) -> Any:  # noqa: ANN401
        with torch.no_grad():
            before = [p.clone() for p in self.trained]
            mixed = self.exchange(self.trained).mixed()
            norm = DataParallelEngine.update(self)  # type: ignore[arg-type]
            moved = torch._foreach_sub(self.trained, before)
            torch._foreach_copy_(self.trained, torch._foreach_add(mixed, moved))
        return norm


class MixesAfter(Mixing):
    """After the step, not before it."""

    def train(self) -> Any:  # noqa: ANN401
        self.on_its_way.mixed()  # type: ignore[attr-defined]
        return DSGDEngine.train(self)  # type: ignore[arg-type]


class KeepsNothing(Mixing):
    """Whatever the algorithm keeps is forgotten after every step."""

    def update(self) -> Tensor | None:
        norm = super().update()
        self.kept = {}
        return norm


class MomentumNotMixed(Mixing):
    def train(self) -> Any:  # noqa: ANN401
        with torch.no_grad():
            ahead = [p.grad for p in self.trained if p.grad is not None]
            if self.kept:
                torch._foreach_add_(ahead, self.kept["momentum"], alpha=self.case.workload.optimizer.momentum)
            norm = DSGDEngine.train(self)  # type: ignore[arg-type]
            self.kept["momentum"] = ahead
        return norm


class MomentumBeforeMixing(Mixing):
    """Quasi-global momentum of the step, not of what mixing makes of it."""

    def train(self) -> Any:  # noqa: ANN401
        options, momentum = self.case.workload.optimizer, self.kept.get("momentum")
        with torch.no_grad():
            moved = [p.grad for p in self.trained if p.grad is not None]
            if momentum:
                torch._foreach_add_(moved, momentum, alpha=options.momentum)
            norm = DSGDEngine.train(self)  # type: ignore[arg-type]
            moved = list(torch._foreach_mul(moved, 1 - options.momentum))
            if momentum:
                torch._foreach_add_(moved, momentum, alpha=options.momentum)
            self.kept["momentum"] = moved
        return norm


class TracksWithoutLast(Mixing):
    """The gradient of the step before is not taken off."""

    def train(self) -> Any:  # noqa: ANN401
        if self.kept:
            torch._foreach_zero_(self.kept["last"])
        return super().train()  # type: ignore[misc]


class TracksAlone(Mixing):
    """The tracked gradients are not mixed."""

    def exchange(self, tensors: Sequence[Tensor]) -> Exchange:
        exchange = super().exchange(tensors)
        if self.kept:
            honest, own = exchange.mixed, [t.detach().clone() for t in self.kept["tracked"]]
            exchange.mixed = lambda weights=None: [*honest(weights)[: len(own)], *own]  # type: ignore[method-assign]
        return exchange


class StepsOnOwn(Mixing):
    """On its own gradient, not on what is tracked."""

    def train(self) -> Any:  # noqa: ANN401
        return MixesFirst.train(self)  # type: ignore[arg-type]


class WholeWeights(Mixing):
    """By W, not by (I + W) / 2."""

    def exchange(self, tensors: Sequence[Tensor]) -> Exchange:
        exchange = super().exchange(tensors)
        honest = exchange.mixed
        exchange.mixed = lambda weights=None: honest()  # type: ignore[method-assign]
        return exchange


_FOUR = Layout(dp=4)
"""Where two average all that they have, a momentum that is mixed is one that is not."""
_DSGD = {
    NeverMixes: "nothing that is heard is mixed in",
    SelfWeightWrong: "replica 0 mixes 0.505, 0.5 times what all sent, where 0.5, 0.5 is right",
    RowStochastic: "replica 0 mixes 0.25, 0.75 times what all sent, where 0.5, 0.5 is right",
    MixesFirst: "states are mixed before the step, not after it",
}
_DPSGD = {
    StaleNeighbours: "what is heard is of the step before",
    MixesAfter: "states are mixed after the step, not before it",
    NeverMixes: "nothing that is heard is mixed in",
    RowStochastic: "replica 0 mixes 0.25, 0.75 times what all sent, where 0.5, 0.5 is right",
}
_DMSGD = {
    KeepsNothing: "without a momentum",
    StaleNeighbours: "what is heard is of the step before",
    RowStochastic: "replica 0 mixes 0.25, 0.75 times what all sent, where 0.5, 0.5 is right",
}
_QUASI_GLOBAL = {
    KeepsNothing: "without a momentum",
    StaleNeighbours: "what is heard is of the step before",
    MomentumNotMixed: "the momentum is each replica's own",
}
_TRACKING = {
    TracksWithoutLast: "the gradient of the step before is not taken off what is tracked",
    TracksAlone: "steps on its own gradient, not on what is tracked",
    StepsOnOwn: "steps on its own gradient, not on what is tracked",
    NeverMixes: "nothing that is heard is mixed in",
}
_DIFFUSION = {
    KeepsNothing: "the step before is not corrected for",
    WholeWeights: "mixed by W, not by [(]I [+] W[)] / 2",
    StaleNeighbours: "what is heard is of the step before",
    SelfWeightWrong: "replica 0 mixes 0.7575, 0.25 times what all sent, where 0.75, 0.25 is right",
}
MUTANTS = [
    *of_algorithm("decentralised", "gpt-mini-dsgd-ring", _DSGD),
    *of_algorithm(
        "decentralised", "gpt-mini-dsgd-one-peer", {MixesLate: "mixed by the matrix of the step before"}, layout=_FOUR
    ),
    *of_algorithm("decentralised", "gpt-mini-dpsgd-ring", _DPSGD),
    *of_algorithm(
        "decentralised", "gpt-mini-heavy-ball-dmsgd-ring", {MomentumNotMixed: "momenta are not mixed"}, layout=_FOUR
    ),
    *of_algorithm("decentralised", "gpt-mini-heavy-ball-dmsgd-ring", _DMSGD),
    *of_algorithm(
        "decentralised",
        "gpt-mini-heavy-ball-quasi-global-ring",
        {MomentumBeforeMixing: "the momentum is of the step before it is mixed"},
        layout=_FOUR,
    ),
    *of_algorithm("decentralised", "gpt-mini-heavy-ball-quasi-global-ring", _QUASI_GLOBAL),
    *of_algorithm("decentralised", "gpt-mini-sgd-gradient-tracking-ring", _TRACKING),
    *of_algorithm("decentralised", "gpt-mini-sgd-exact-diffusion-ring", _DIFFUSION),
]
