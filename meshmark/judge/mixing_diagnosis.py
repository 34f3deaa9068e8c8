"""What is wrong with parameters that were mixed along a graph: its weights, the algorithm, or the update rule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.decentralised import Decentralised
from meshmark.algorithms.replicas import Tensors, UpdateRule
from meshmark.algorithms.table import ALONG_GRAPHS, local_optimizer
from meshmark.judge.failed_replicas import LEFT_OVER, FailedReplicas, flat, listed, misfit
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.mixing_rivals import rival_mixings
from meshmark.judge.truth import ExactOptimizer
from meshmark.judge.update_rivals import rivals


def explain_mixing(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation:
    """`wrong`: parameters by replica, the worst first. Of several accounts of the failed step, that which goes on to
    explain the most steps: at the first all replicas stand at one place, and many are the same."""
    workload = failed.case.workload
    real, spec = ALONG_GRAPHS[workload.algorithm.kind], local_optimizer(workload)

    def replayed(kind: type[Decentralised], rules: Sequence[UpdateRule] | None = None) -> list[list[Tensors]]:
        every = rules or [ExactOptimizer(spec) for _ in failed.traces]
        return _replayed(failed, kind(workload, every))

    exact = replayed(real)

    def explained(there: list[list[Tensors]]) -> int:
        return _steps_explained(failed, wrong, exact, there)

    def accounts() -> Iterator[tuple[int, Explanation]]:
        for how, rival in rival_mixings(workload.algorithm):
            yield explained(replayed(rival)), (Fault.ALGORITHM, how)
        yield _weights(failed, wrong, exact, real(workload, [ExactOptimizer(spec) for _ in failed.traces]))
        for every in zip(*(rivals(spec, failed.step) for _ in failed.traces), strict=True):
            if every[0].gradients is None:
                there = replayed(real, [rival.optimizer for rival in every])
                yield explained(there), (every[0].fault, every[0].detail)
        for factor in (2.0, 0.5):
            rate = replace(spec, learning_rate=factor * spec.learning_rate)
            there = replayed(real, [ExactOptimizer(rate) for _ in failed.traces])
            yield explained(there), (Fault.UPDATE, f"{factor:g} times the right step")

    most, best = 0, (Fault.UNEXPLAINED, "the gradients are right, and no known mixing of no known update rule is this")
    for steps, account in accounts():
        if steps > most:
            most, best = steps, account
        if most == len(exact) - failed.step:
            break
    return best


def _replayed(failed: FailedReplicas, algorithm: Decentralised) -> list[list[Tensors]]:
    """By step, where it puts each replica."""
    return [algorithm.transition(*_at(failed, step)) for step in range(len(failed.traces[0].gradients))]


def _at(failed: FailedReplicas, step: int) -> tuple[list[Tensors], list[Tensors]]:
    uses = failed.case.workload.uses
    own: list[Tensors] = [{n: g for n, g in trace.gradients[step].items() if uses(n, step)} for trace in failed.traces]
    return [trace.parameters[step] for trace in failed.traces], own


def _steps_explained(
    failed: FailedReplicas,
    wrong: dict[int, list[str]],
    exact: Sequence[Sequence[Tensors]],
    there: Sequence[Sequence[Tensors]],
) -> int:
    """From the failed one on, without a gap."""
    steps = range(failed.step, len(there))
    unexplained = (s for s in steps if not misfit(replace(failed, step=s), wrong, exact[s], there[s]) <= 1)
    return next(unexplained, len(there)) - failed.step


def _weights(
    failed: FailedReplicas, wrong: dict[int, list[str]], exact: Sequence[Sequence[Tensors]], algorithm: Decentralised
) -> tuple[int, Explanation]:
    """By how much of what each replica sent the worst one's parameters are made, and for how many steps they are made
    of what was sent at all."""
    replica, names = next(iter(wrong.items()))
    count, detail = 0, ""
    for step in range(len(exact)):
        here, own = _at(failed, step)
        if step >= failed.step:
            after = flat(failed.traces[replica].parameters[step + 1], names)
            basis, kept = _parts(algorithm, here, own, replica, names)
            weights, _, rank, _ = np.linalg.lstsq(basis, after - kept, rcond=None)
            off = np.linalg.norm(after - flat(exact[step][replica], names))
            if np.linalg.norm(after - kept - basis @ weights) > LEFT_OVER * off:
                break
            count, detail = count + 1, detail or _told(replica, weights, int(rank), algorithm.matrix()[replica])
        algorithm.transition(here, own)
    return count, (Fault.ALGORITHM, detail)


def _parts(
    algorithm: Decentralised, here: Sequence[Tensors], own: Sequence[Tensors], replica: int, names: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What a replica becomes by what each sent, alone, and by nothing: its next state is linear in what is heard."""
    trying = copy.deepcopy(algorithm)
    sent = trying.sent(here, own)

    def becomes(heard: Tensors) -> NDArray[np.float64]:
        after = copy.deepcopy(trying).arrive(here, own, [heard] * len(here))
        return flat(after[replica], names)

    kept = becomes({name: np.zeros_like(x) for name, x in sent[0].items()})
    return np.stack([becomes(state) - kept for state in sent], axis=1), kept


def _told(replica: int, weights: NDArray[np.floating], rank: int, right: Sequence[float]) -> str:
    if rank < len(weights):
        return f"replica {replica} mixes what all sent, which is the same, {weights.sum():.4g} times, where 1 is right"
    return f"replica {replica} mixes {listed(list(weights))} times what all sent, where {listed(right)} is right"
