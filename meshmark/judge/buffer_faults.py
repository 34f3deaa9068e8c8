"""Explain wrong buffers: what would have produced these running statistics of a batch norm?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshmark.judge.buffers import exact_buffers, known_parameters, replica_truth, together
from meshmark.judge.deviation import Tensors
from meshmark.judge.failed_step import LEFT_OVER, Explanation, FailedStep
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import low_precisions
from meshmark.text import pluralize

_MOMENTA = (0.9, 0.5, 0.2, 0.05, 0.01, 0.001, 1.0, 0.0)
"""Alternative momenta. Frameworks define momentum differently: 0.9 in one is 0.1 in another."""


def explain_buffers(failed: FailedStep, names: list[str]) -> tuple[Explanation, list[int]]:
    """Return why these buffers have their values after the step, and on which ranks."""
    workload, layout, replicas = failed.case.workload, failed.case.layout, failed.trace.buffers
    exact = [replica_truth(failed.trace, workload, layout, r, failed.step) for r in range(len(replicas))]
    distances = [_distance(told[failed.step + 1], x, names) for told, x in zip(replicas, exact, strict=True)]
    wrong = [r for r, distance in enumerate(distances) if not distance <= LEFT_OVER * max(distances)]
    worst = max(wrong, key=lambda r: distances[r])
    told, before = replicas[worst][failed.step + 1], replicas[worst][failed.step]
    if absent := [name for name in names if name not in told]:
        return (Fault.MISSING, f"{pluralize(len(absent), 'buffer is', 'buffers are')} absent"), wrong

    def fits(rival: Tensors) -> bool:
        return _distance(told, rival, names) <= LEFT_OVER * distances[worst]

    if fits(before):
        return (Fault.BUFFERS, "as before the step: not updated"), wrong
    if others := [r for r, x in enumerate(exact) if r != worst and fits(x)]:
        return (Fault.BUFFERS, f"those of rank {others[0]}"), wrong
    if kinds := low_precisions(told[name] for name in names if told[name].dtype.kind == "f"):
        return (Fault.BUFFERS, f"every value is a {kinds[0]} number"), wrong
    own = together(workload, failed.batch.shard(worst, len(replicas)), layout)
    here = known_parameters(failed.trace, workload, failed.step)
    for r, other in enumerate(replicas):
        if r != worst and fits(exact_buffers(workload, here, other[failed.step], own)):
            return (Fault.BUFFERS, f"as if the step had begun with those of rank {r}"), wrong
    if fits(exact_buffers(workload, here, before, [part for part in own for _ in range(2)])):
        return (Fault.BUFFERS, "as if every micro-batch had been seen twice, as where blocks are computed again"), wrong
    for momentum in _MOMENTA:
        if fits(exact_buffers(workload, here, before, own, momentum)):
            return (Fault.BUFFERS, f"with a momentum of {momentum:g}"), wrong
    return (Fault.BUFFERS, "no other momentum and no other replica's micro-batches explain them"), wrong


def _distance(told: Tensors, exact: Tensors, names: Iterable[str]) -> float:
    """Return the distance over all buffers together. Infinite if one is missing."""
    if any(name not in told or name not in exact for name in names):
        return float("inf")
    return float(np.sqrt(sum(np.sum(np.square(told[n].astype(np.float64) - exact[n])) for n in names)))
