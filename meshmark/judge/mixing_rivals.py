"""The rivals of a right mixing: algorithms along graphs with one thing changed, as they are got wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshmark.algorithms.corrected import ExactDiffusion, GradientTracking
from meshmark.algorithms.decentralised import Decentralised, ParallelSGD, QuasiGlobal, WithMomentum, both, parted
from meshmark.algorithms.replicas import Tensors, combined
from meshmark.algorithms.table import ALONG_GRAPHS
from meshmark.spec.algorithm import AlgorithmKind, AlgorithmSpec
from meshmark.spec.graph import Matrix


class Stale(Decentralised):
    """What is heard is of the step before, or one's own where nothing was heard yet."""

    before: list[Tensors] | None = None

    def mix(self, sent: Sequence[Tensors]) -> list[Tensors]:
        heard, now = self.before, list(sent)
        self.before = now
        found = []
        for i, row in enumerate(self.matrix()):
            others = [heard[j] if heard and heard[j].keys() == now[j].keys() else now[i] for j in range(len(now))]
            found.append(combined(*((weight, now[j] if i == j else others[j]) for j, weight in enumerate(row))))
        return found


class Late(Decentralised):
    """By the matrix of the step before."""

    def matrix(self) -> Matrix:
        return self.graph.matrix(len(self.rules), max(self.steps - 1, 0))


class Early(Decentralised):
    """By the matrix of the next step."""

    def matrix(self) -> Matrix:
        return self.graph.matrix(len(self.rules), self.steps + 1)


class LocalMomentum(WithMomentum):
    """Each replica's momentum is its own."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        self.momenta = self.ahead(gradients)
        return self.alone(parameters, self.momenta)


class BeforeMixing(QuasiGlobal):
    """The momentum is of the step itself, not of what mixing made of it."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        states = super().sent(parameters, gradients)
        self.follow(parameters, states)
        return states

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        return list(heard)


class NotSubtracted(GradientTracking):
    """The gradient of the step before is not taken off what is tracked."""

    def change(self, now: Tensors, before: Tensors) -> Tensors:
        return now


class NotShared(GradientTracking):
    """What is tracked is not mixed."""

    def mix(self, sent: Sequence[Tensors]) -> list[Tensors]:
        (there, _), (_, own) = parted(super().mix(sent)), parted(sent)
        return [both(x, y) for x, y in zip(there, own, strict=True)]


class Uncorrected(ExactDiffusion):
    """Nothing of the step before is taken off."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return self.alone(parameters, gradients)


class WholeWeights(ExactDiffusion):
    """By W itself, not by (I + W) / 2."""

    def matrix(self) -> Matrix:
        return Decentralised.matrix(self)


class Unmixed(Decentralised):
    """As if nobody were there."""

    def matrix(self) -> Matrix:
        count = len(self.rules)
        return tuple(tuple(float(i == j) for j in range(count)) for i in range(count))


_OF_ALL = {"nothing that is heard is mixed in": Unmixed, "what is heard is of the step before": Stale}
_OF_CHANGING = {"mixed by the matrix of the step before": Late, "mixed by the matrix of the next step": Early}
"""Graphs."""
_OF_KINDS: dict[AlgorithmKind, dict[str, type[Decentralised]]] = {
    AlgorithmKind.DSGD: {"states are mixed before the step, not after it": ParallelSGD},
    AlgorithmKind.DPSGD: {"states are mixed after the step, not before it": Decentralised},
    AlgorithmKind.DMSGD: {
        "momenta are not mixed": LocalMomentum,
        "without a momentum": Decentralised,
        "the momentum is quasi-global": QuasiGlobal,
    },
    AlgorithmKind.QUASI_GLOBAL: {
        "the momentum is each replica's own": LocalMomentum,
        "without a momentum": Decentralised,
        "the momentum is of the step before it is mixed": BeforeMixing,
    },
    AlgorithmKind.GRADIENT_TRACKING: {
        "steps on its own gradient, not on what is tracked": ParallelSGD,
        "the gradient of the step before is not taken off what is tracked": NotSubtracted,
        "what is tracked is not mixed": NotShared,
        "states are mixed after the step, and nothing is tracked": Decentralised,
    },
    AlgorithmKind.EXACT_DIFFUSION: {
        "the step before is not corrected for": Uncorrected,
        "mixed by W, not by (I + W) / 2": WholeWeights,
    },
}


def rival_mixings(spec: AlgorithmSpec) -> Iterator[tuple[str, type[Decentralised]]]:
    """Each with what it says of a run that it explains."""
    real: Any = ALONG_GRAPHS[spec.kind]
    changing = spec.graph is not None and not spec.graph.is_static
    for how, change in {**_OF_ALL, **(_OF_CHANGING if changing else {})}.items():
        yield how, type(change.__name__, (change, real), {})
    yield from _OF_KINDS[spec.kind].items()
