"""What is wrong with parameters that were mixed along a graph: its weights, the algorithm, or the update rule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.decentralised import Decentralised
from meshmark.algorithms.replicas import Tensors
from meshmark.algorithms.table import ALONG_GRAPHS
from meshmark.judge.failed_replicas import LEFT_OVER, FailedReplicas, flat, listed
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.mixing_rivals import rival_mixings
from meshmark.judge.replays import Account, Replays


def explain_mixing(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation:
    """`wrong`: parameters by replica, the worst first."""
    workload = failed.case.workload
    real = ALONG_GRAPHS[workload.algorithm.kind]
    replays = Replays(failed, wrong, real)

    def accounts() -> Iterator[Account]:
        for how, rival in rival_mixings(workload.algorithm):
            yield replays.explained(rival), (Fault.ALGORITHM, how)
        yield _weights(failed, wrong, replays.exact, real(workload, replays.rules()))
        yield from replays.of_rules()

    unknown = "the gradients are right, and no known mixing of no known update rule is this"
    return replays.longest(accounts()) or (Fault.UNEXPLAINED, unknown)


def _weights(
    failed: FailedReplicas, wrong: dict[int, list[str]], exact: Sequence[Sequence[Tensors]], algorithm: Decentralised
) -> tuple[int, Explanation]:
    """By how much of what each replica sent the worst one's parameters are made, and for how many steps they are made
    of what was sent at all."""
    replica, names = next(iter(wrong.items()))
    count, detail = 0, ""
    for step in range(len(exact)):
        here, own = failed.at(step)
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
