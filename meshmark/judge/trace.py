"""Traces: a run's parameters, gradients and losses by step, gathered on rank 0."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from meshmark import rank_progress
from meshmark.algorithms.contract import ObservedRun, ServerVersions
from meshmark.judge.deviation import Drift, QuantityKind, Tensors
from meshmark.judge.gather import all_gather_json, gather_arrays

_MOST_DRIFTED = 16
"""Number of tensors per rank, the smallest ones: enough to show which parts they are made of."""


@dataclass(kw_only=True)
class Trace:
    """Notes of one rank, or of all ranks together. Lists run over steps."""

    parameters: list[Tensors] = field(default_factory=list)
    """Before the first step, then after every step: one more than steps."""
    gradients: list[Tensors] = field(default_factory=list)
    """Reduced, unclipped."""
    losses: list[float] = field(default_factory=list)
    """Shares, or the global mean."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, as the framework reports it."""
    evaluations: list[float] = field(default_factory=list)
    """Losses like `losses`, but in evaluation, before each step. Empty if not requested."""
    buffers: list[list[Tensors]] = field(default_factory=list)
    """By replica, then like `parameters`. Empty if the workload has none."""
    replica: int = 0
    """Replica whose buffers a rank reports. Each rank of a pipeline has some of them."""
    left_out: list[int] = field(default_factory=list)
    """Attempts at each step that loss scaling skipped on all ranks. Only running statistics remain of them.

    Empty if they were not counted.
    """
    loss_scales: list[float] = field(default_factory=list)
    """Factors on the loss. Empty if not requested."""
    versions: list[ServerVersions | None] = field(default_factory=list)
    """Versions of a parameter server that the engine reported for each step."""
    drifted: dict[int, Tensors] = field(default_factory=dict)
    """By rank: some of the gradients that differ from the lowest rank's, at the first step with drift.

    Only for all ranks together.
    """


def observed_run(traces: Sequence[Trace], failed_step: int = 0) -> ObservedRun:
    """Return what all replicas reported, for algorithms to inspect."""
    return ObservedRun(
        parameters=[trace.parameters for trace in traces],
        gradients=[trace.gradients for trace in traces],
        server_versions=[trace.versions for trace in traces],
        failed_step=failed_step,
    )


def host_copies(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return copies on the host. bf16 and fp16 are widened to float32, exactly."""
    return {name: host_copy(tensor) for name, tensor in tensors.items()}


def host_copy(tensor: Tensor, *, shared: bool = False) -> NDArray[np.floating]:
    """Return a copy on the host. With `shared`, it may share the tensor's memory, if it is not kept."""
    host = tensor.detach().cpu()
    value: NDArray[np.floating] = (host if host.dtype.itemsize >= 4 else host.float()).numpy()
    return value if shared else value.copy()


def gather_trace(own: Trace) -> tuple[Trace | None, list[Drift], int]:
    """Gather all ranks' traces on rank 0. A collective call.

    Returns the union (None elsewhere) with each tensor from the lowest rank that holds it, the drifts between
    replicas, and the number of tensors over all steps that more than one rank reported.
    """
    traces, drifts, num_replicated = gather_replicas(own, [0] * dist.get_world_size())
    return (traces[0] if traces else None), drifts, num_replicated


def gather_replicas(
    own: Trace, replicas: Sequence[int], together: bool = False
) -> tuple[list[Trace], list[Drift], int]:
    """Gather one trace per replica on rank 0 (none elsewhere). A collective call.

    `replicas` is the replica of each rank. Also returns the drifts between ranks of one replica, and the number of
    tensors that more than one rank reported. With `together`, parameters of all ranks are compared.
    """
    rank_progress.begin(rank_progress.Phase.GATHER)
    digests = [tensor_digests(own.parameters), tensor_digests(own.gradients)]
    everyone: list[list[list[dict[str, str]]]] = all_gather_json(digests)
    peers = {r: [rank for rank, its in enumerate(replicas) if its == r] for r in dict.fromkeys(replicas)}
    alike = [list(range(len(replicas)))] if together else list(peers.values())
    lower = [rank for rank in peers[replicas[dist.get_rank()]] if rank < dist.get_rank()]
    mine = Trace(
        parameters=_owned(own.parameters, [everyone[rank][0] for rank in lower]),
        gradients=_owned(own.gradients, [everyone[rank][1] for rank in lower]),
        losses=own.losses,
        norms=own.norms,
        evaluations=own.evaluations,
        buffers=own.buffers,
        replica=own.replica,
        left_out=own.left_out,
        loss_scales=own.loss_scales,
        versions=own.versions,
    )
    drifts = [
        drift
        for i, kind in enumerate((QuantityKind.PARAMETERS, QuantityKind.GRADIENTS))
        for ranks in (alike if kind is QuantityKind.PARAMETERS else peers.values())
        for drift in drifts_between(kind, {rank: everyone[rank][i] for rank in ranks})
    ]
    mine.drifted = _drifted(own, drifts)
    traces = _gather(mine)
    if traces is None:
        return [], [], 0
    unions = [union_of([traces[rank] for rank in ranks]) for _, ranks in sorted(peers.items())]
    num_told = sum(len(tensors) for kinds in everyone for steps in kinds for tensors in steps)
    num_held = sum(len(tensors) for union in unions for tensors in [*union.parameters, *union.gradients])
    return unions, drifts, num_told - num_held


def union_of(traces: Sequence[Trace]) -> Trace:
    """Return the union of traces of one replica's ranks, no two of which hold the same tensor."""
    reported = [trace.norms for trace in traces]
    return Trace(
        parameters=[_union(parts) for parts in zip(*(t.parameters for t in traces), strict=True)],
        gradients=[_union(parts) for parts in zip(*(t.gradients for t in traces), strict=True)],
        losses=[sum(shares) for shares in zip(*(t.losses for t in traces), strict=True)],
        norms=[next((n for n in norms if n is not None), None) for norms in zip(*reported, strict=True)],
        evaluations=[sum(shares) for shares in zip(*(t.evaluations for t in traces), strict=True)],
        buffers=_whole_buffers(traces),
        left_out=traces[0].left_out,
        loss_scales=traces[0].loss_scales,
        versions=traces[0].versions,
        drifted={rank: held for trace in traces for rank, held in trace.drifted.items()},
    )


def _whole_buffers(traces: Sequence[Trace]) -> list[list[Tensors]]:
    """Return the buffers by replica, from the parts that its ranks report."""
    ranks: dict[int, list[list[Tensors]]] = {}
    for trace in traces:
        for told in trace.buffers:
            ranks.setdefault(trace.replica, []).append(told)
    return [[_union(parts) for parts in zip(*ranks[replica], strict=True)] for replica in sorted(ranks)]


def _gather(own: Trace) -> list[Trace] | None:
    """Return every rank's trace on rank 0, and None elsewhere. A collective call."""
    buffers = [tensors for replica in own.buffers for tensors in replica]
    kinds = (own.parameters, own.gradients, list(own.drifted.values()), buffers)
    names = [[list(tensors) for tensors in kind] for kind in kinds]
    counts = [len(replica) for replica in own.buffers]
    numbers = [own.losses, own.norms, own.evaluations, own.left_out, own.loss_scales, own.versions]
    headers = all_gather_json([names, numbers, list(own.drifted), counts, own.replica])
    everyone = gather_arrays([value for kind in kinds for tensors in kind for value in tensors.values()])
    if everyone is None:
        return None
    traces = []
    for (kinds_names, numbers, ranks, counts, replica), arrays in zip(headers, everyone, strict=True):
        losses, norms, evaluations, left_out, loss_scales, versions = numbers
        values = iter(arrays)
        every: list[list[Tensors]] = [[{name: next(values) for name in step} for step in kind] for kind in kinds_names]
        parameters, gradients, drifted, buffers = every
        steps = iter(buffers)
        traces.append(
            Trace(
                parameters=parameters,
                gradients=gradients,
                losses=losses,
                norms=norms,
                evaluations=evaluations,
                left_out=left_out,
                loss_scales=loss_scales,
                versions=versions,
                drifted=dict(zip(ranks, drifted, strict=True)),
                replica=replica,
                buffers=[[next(steps) for _ in range(count)] for count in counts],
            )
        )
    return traces


def _drifted(own: Trace, drifts: list[Drift]) -> dict[int, Tensors]:
    """Return this rank's part of `Trace.drifted`."""
    rank, gradients = dist.get_rank(), [d for d in drifts if d.quantity.kind is QuantityKind.GRADIENTS]
    first = min((d.step for d in gradients), default=0)
    here = {
        d.quantity.name: own.gradients[first][d.quantity.name] for d in gradients if d.step == first and rank in d.ranks
    }
    smallest = sorted(here, key=lambda name: here[name].size)[:_MOST_DRIFTED]
    return {rank: {name: here[name] for name in smallest}} if here else {}


def tensor_digests(steps: list[Tensors]) -> list[dict[str, str]]:
    """Return a hash of every tensor's bits, by step and name."""
    return [{name: digest(value) for name, value in s.items()} for s in steps]


_HASHED_AT_ONCE = 2**23
"""Bytes per part. Larger tensors are hashed in parts, on all cores that a rank may use, and then their hashes."""


def digest(value: NDArray[np.floating]) -> str:
    """Return a hash of all bits of `value`. It does not depend on the number of cores."""
    content = np.ascontiguousarray(value).data.cast("B") if value.size else memoryview(b"")
    if len(content) <= _HASHED_AT_ONCE:
        return _hash(content).hexdigest()
    parts = [content[first : first + _HASHED_AT_ONCE] for first in range(0, len(content), _HASHED_AT_ONCE)]
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // num_ranks, 1)) as threads:
        return _hash(b"".join(part.digest() for part in threads.map(_hash, parts))).hexdigest()


def _hash(content: bytes | memoryview) -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=8)


def _owned(steps: list[Tensors], lower: list[list[dict[str, str]]]) -> list[Tensors]:
    """Return the tensors that no lower rank of the same replica also holds."""
    return [
        {name: value for name, value in tensors.items() if not any(name in held[step] for held in lower)}
        for step, tensors in enumerate(steps)
    ]


def _union(parts: tuple[Tensors, ...]) -> Tensors:
    return {name: value for part in parts for name, value in part.items()}


def drifts_between(kind: QuantityKind, everyone: Mapping[int, list[dict[str, str]]]) -> list[Drift]:
    """Return the drifts between ranks that should hold the same."""
    found = []
    for step in range(len(next(iter(everyone.values())))):
        names = {name for held in everyone.values() for name in held[step]}
        for name in sorted(names):
            digests = {rank: held[step][name] for rank, held in everyone.items() if name in held[step]}
            most = Counter(digests[rank] for rank in sorted(digests)).most_common(1)[0][0]
            if ranks := sorted(rank for rank, digest in digests.items() if digest != most):
                others = sorted(digests.keys() - set(ranks))
                found.append(Drift(quantity=kind.of(name), step=step, ranks=ranks, others=others))
    return found
