"""How algorithms along graphs are got wrong: one thing changed, or other weights than the graph's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.contract import LEFT_OVER, FaultHypothesis, ObservedRun, Tensors, combined, flat, listed
from meshmark.algorithms.decentralised import Decentralised
from meshmark.algorithms.decentralised.graph import Matrix
from meshmark.algorithms.decentralised.transition import (
    DecentralisedTransition,
    ExactDiffusionTransition,
    GradientTrackingTransition,
    ParallelTransition,
    QuasiGlobalTransition,
    WithMomentum,
    both,
    parted,
)
from meshmark.spec.workload import Workload


class Stale(DecentralisedTransition):
    """Messages are from the step before, or a replica's own values if none has arrived yet."""

    before: list[Tensors] | None = None

    def mix(self, sent: Sequence[Tensors]) -> list[Tensors]:
        heard, now = self.before, list(sent)
        self.before = now
        found = []
        for i, row in enumerate(self.matrix()):
            others = [heard[j] if heard and heard[j].keys() == now[j].keys() else now[i] for j in range(len(now))]
            found.append(combined(*((weight, now[j] if i == j else others[j]) for j, weight in enumerate(row))))
        return found


class Late(DecentralisedTransition):
    """Replicas mix by the matrix of the step before."""

    def matrix(self) -> Matrix:
        return self.graph.matrix(len(self.rules), max(self.steps - 1, 0))


class Early(DecentralisedTransition):
    """Replicas mix by the matrix of the next step."""

    def matrix(self) -> Matrix:
        return self.graph.matrix(len(self.rules), self.steps + 1)


class LocalMomentum(WithMomentum):
    """Each replica's momentum is its own."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        self.momenta = self.ahead(gradients)
        return self.alone(parameters, self.momenta)


class BeforeMixing(QuasiGlobalTransition):
    """The momentum is of the step itself, not of what mixing made of it."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        states = super().sent(parameters, gradients)
        self.update_momenta(parameters, states)
        return states

    def arrive(
        self, parameters: Sequence[Tensors], gradients: Sequence[Tensors], heard: Sequence[Tensors]
    ) -> list[Tensors]:
        return list(heard)


class NotSubtracted(GradientTrackingTransition):
    """The gradient of the step before is not taken off what is tracked."""

    def change(self, now: Tensors, before: Tensors) -> Tensors:
        return now


class NotShared(GradientTrackingTransition):
    """The tracked gradient is not mixed."""

    def mix(self, sent: Sequence[Tensors]) -> list[Tensors]:
        (there, _), (_, own) = parted(super().mix(sent)), parted(sent)
        return [both(x, y) for x, y in zip(there, own, strict=True)]


class Uncorrected(ExactDiffusionTransition):
    """Nothing of the step before is taken off."""

    def sent(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        return self.alone(parameters, gradients)


class WholeWeights(ExactDiffusionTransition):
    """Replicas mix by W, not by (I + W) / 2."""

    def matrix(self) -> Matrix:
        return DecentralisedTransition.matrix(self)


class Unmixed(DecentralisedTransition):
    """As if nobody were there."""

    def matrix(self) -> Matrix:
        count = len(self.rules)
        return tuple(tuple(float(i == j) for j in range(count)) for i in range(count))


_OF_ALL = {"nothing that is heard is mixed in": Unmixed, "what is heard is of the step before": Stale}
_OF_CHANGING = {"mixed by the matrix of the step before": Late, "mixed by the matrix of the next step": Early}
_OF_KINDS: dict[str, dict[str, type[DecentralisedTransition]]] = {
    "dsgd": {"states are mixed before the step, not after it": ParallelTransition},
    "dpsgd": {"states are mixed after the step, not before it": DecentralisedTransition},
    "dmsgd": {
        "momenta are not mixed": LocalMomentum,
        "without a momentum": DecentralisedTransition,
        "the momentum is quasi-global": QuasiGlobalTransition,
    },
    "quasi-global": {
        "the momentum is each replica's own": LocalMomentum,
        "without a momentum": DecentralisedTransition,
        "the momentum is of the step before it is mixed": BeforeMixing,
    },
    "gradient-tracking": {
        "steps on its own gradient, not on what is tracked": ParallelTransition,
        "the gradient of the step before is not taken off what is tracked": NotSubtracted,
        "what is tracked is not mixed": NotShared,
        "states are mixed after the step, and nothing is tracked": DecentralisedTransition,
    },
    "exact-diffusion": {
        "the step before is not corrected for": Uncorrected,
        "mixed by W, not by (I + W) / 2": WholeWeights,
    },
}


def mixing_faults(algorithm: Decentralised) -> Iterator[FaultHypothesis]:
    real: Any = algorithm.transition_class()
    for how, change in {**_OF_ALL, **({} if algorithm.graph.is_static else _OF_CHANGING)}.items():
        yield FaultHypothesis(how, type(change.__name__, (change, real), {}))
    for how, wrong in _OF_KINDS.get(algorithm.kind, {}).items():
        yield FaultHypothesis(how, wrong)


def estimated_weights(
    transition: DecentralisedTransition,
    workload: Workload,
    run: ObservedRun,
    wrong: Mapping[int, Sequence[str]],
    exact: Sequence[list[Tensors]],
) -> tuple[int, str]:
    """Estimate by how much of what each replica sent the worst one's parameters are made.

    Return for how many steps from the failed one on they are made of what was sent at all, and the weights in words.
    """
    replica, names = next(iter(wrong.items()))
    count, detail = 0, ""
    for step in range(len(exact)):
        here = [states[step] for states in run.parameters]
        own: list[Tensors] = [{n: g for n, g in g[step].items() if workload.uses(n, step)} for g in run.gradients]
        if step >= run.failed_step:
            after = flat(run.parameters[replica][step + 1], names)
            basis, kept = _parts(transition, here, own, replica, names)
            weights, _, rank, _ = np.linalg.lstsq(basis, after - kept, rcond=None)
            off = np.linalg.norm(after - flat(exact[step][replica], names))
            if np.linalg.norm(after - kept - basis @ weights) > LEFT_OVER * off:
                break
            count, detail = count + 1, detail or _in_words(replica, weights, int(rank), transition.matrix()[replica])
        transition.transition(here, own)
    return count, detail


def _parts(
    transition: DecentralisedTransition,
    here: Sequence[Tensors],
    own: Sequence[Tensors],
    replica: int,
    names: Sequence[str],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what a replica becomes by what each sent, alone, and by nothing; its next state is linear in these."""
    trying = copy.deepcopy(transition)
    sent = trying.sent(here, own)

    def becomes(heard: Tensors) -> NDArray[np.float64]:
        after = copy.deepcopy(trying).arrive(here, own, [heard] * len(here))
        return flat(after[replica], names)

    kept = becomes({name: np.zeros_like(x) for name, x in sent[0].items()})
    return np.stack([becomes(state) - kept for state in sent], axis=1), kept


def _in_words(replica: int, weights: NDArray[np.floating], rank: int, right: Sequence[float]) -> str:
    if rank < len(weights):
        return f"replica {replica} mixes what all sent, which is the same, {weights.sum():.4g} times, where 1 is right"
    return f"replica {replica} mixes {listed(list(weights))} times what all sent, where {listed(right)} is right"
