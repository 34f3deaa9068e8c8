"""What a run computed: its parameters, gradients and losses, step by step, brought together on rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from torch import Tensor

from meshmark import rank_progress
from meshmark.judge.deviation import Drift, QuantityKind, Tensors
from meshmark.judge.gather import all_gather_json, gather_arrays

_MOST_DRIFTED = 4
"""Tensors a rank: enough to see whose sequences they are made of."""


@dataclass(kw_only=True)
class Trace:
    """One rank's notes, or all ranks' together. Lists run over steps."""

    parameters: list[Tensors] = field(default_factory=list)
    """Before the first step, then after every step: one more than steps."""
    gradients: list[Tensors] = field(default_factory=list)
    """Reduced, unclipped."""
    losses: list[float] = field(default_factory=list)
    """Shares, or the global mean."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, as the framework told it."""
    evaluations: list[float] = field(default_factory=list)
    """Losses like `losses`, but in evaluation, before each step; empty when nobody asked."""
    drifted: dict[int, Tensors] = field(default_factory=dict)
    """Of the first step at which gradients drift: some of those that a rank holds otherwise than the lowest, by rank.
    Of all ranks together only."""


def host_copies(tensors: Mapping[str, Tensor]) -> Tensors:
    """A copy on the host; bf16 and fp16 widen to float32, exactly."""
    copies = {}
    for name, tensor in tensors.items():
        host = tensor.detach().cpu()
        copies[name] = (host if host.dtype.itemsize >= 4 else host.float()).numpy().copy()
    return copies


def gather_trace(own: Trace) -> tuple[Trace | None, list[Drift], int]:
    """The union of all ranks' traces on rank 0 (None elsewhere), each tensor from the lowest rank that holds it; where
    replicas drifted apart; and how many tensors of all steps more than one rank told. A collective call."""
    rank_progress.begin(rank_progress.Phase.GATHER)
    digests = [tensor_digests(own.parameters), tensor_digests(own.gradients)]
    everyone: list[list[list[dict[str, str]]]] = all_gather_json(digests)
    mine = Trace(
        parameters=_owned(own.parameters, [e[0] for e in everyone]),
        gradients=_owned(own.gradients, [e[1] for e in everyone]),
        losses=own.losses,
        norms=own.norms,
        evaluations=own.evaluations,
    )
    drifts = _drifts(QuantityKind.PARAMETERS, [e[0] for e in everyone])
    drifts += _drifts(QuantityKind.GRADIENTS, [e[1] for e in everyone])
    mine.drifted = _drifted(own, drifts)
    traces = _gather(mine)
    if traces is None:
        return None, [], 0
    reported = [trace.norms for trace in traces]
    union = Trace(
        parameters=[_union(parts) for parts in zip(*(t.parameters for t in traces), strict=True)],
        gradients=[_union(parts) for parts in zip(*(t.gradients for t in traces), strict=True)],
        losses=[sum(shares) for shares in zip(*(t.losses for t in traces), strict=True)],
        norms=[next((n for n in norms if n is not None), None) for norms in zip(*reported, strict=True)],
        evaluations=[sum(shares) for shares in zip(*(t.evaluations for t in traces), strict=True)],
        drifted={rank: held for trace in traces for rank, held in trace.drifted.items()},
    )
    num_told = sum(len(tensors) for kinds in everyone for steps in kinds for tensors in steps)
    num_held = sum(len(tensors) for tensors in [*union.parameters, *union.gradients])
    return union, drifts, num_told - num_held


def _gather(own: Trace) -> list[Trace] | None:
    """Every rank's trace on rank 0; None elsewhere. A collective call."""
    kinds = (own.parameters, own.gradients, list(own.drifted.values()))
    names = [[list(tensors) for tensors in kind] for kind in kinds]
    headers = all_gather_json([names, own.losses, own.norms, own.evaluations, list(own.drifted)])
    everyone = gather_arrays([value for kind in kinds for tensors in kind for value in tensors.values()])
    if everyone is None:
        return None
    traces = []
    for (kinds_names, losses, norms, evaluations, ranks), arrays in zip(headers, everyone, strict=True):
        values = iter(arrays)
        parameters, gradients, drifted = (
            [{name: next(values) for name in step} for step in kind] for kind in kinds_names
        )
        traces.append(
            Trace(
                parameters=parameters,
                gradients=gradients,
                losses=losses,
                norms=norms,
                evaluations=evaluations,
                drifted=dict(zip(ranks, drifted, strict=True)),
            )
        )
    return traces


def _drifted(own: Trace, drifts: list[Drift]) -> dict[int, Tensors]:
    """What `Trace.drifted` takes of this rank."""
    rank, gradients = dist.get_rank(), [d for d in drifts if d.quantity.kind is QuantityKind.GRADIENTS]
    first = min((d.step for d in gradients), default=0)
    names = [d.quantity.name for d in gradients if d.step == first and rank in d.ranks][:_MOST_DRIFTED]
    return {rank: {name: own.gradients[first][name] for name in names}} if names else {}


def tensor_digests(steps: list[Tensors]) -> list[dict[str, str]]:
    """A hash of every tensor's bits, by step and name."""
    return [
        {
            name: hashlib.blake2b(np.ascontiguousarray(value).data, digest_size=8).hexdigest()
            for name, value in s.items()
        }
        for s in steps
    ]


def _owned(steps: list[Tensors], everyone: list[list[dict[str, str]]]) -> list[Tensors]:
    """Tensors that no lower rank holds as well."""
    lower = everyone[: dist.get_rank()]
    return [
        {name: value for name, value in tensors.items() if not any(name in held[step] for held in lower)}
        for step, tensors in enumerate(steps)
    ]


def _union(parts: tuple[Tensors, ...]) -> Tensors:
    return {name: value for part in parts for name, value in part.items()}


def _drifts(kind: QuantityKind, everyone: list[list[dict[str, str]]]) -> list[Drift]:
    found = []
    for step in range(len(everyone[0])):
        names = {name for held in everyone for name in held[step]}
        for name in sorted(names):
            digests = {rank: held[step][name] for rank, held in enumerate(everyone) if name in held[step]}
            first = digests[min(digests)]
            if ranks := [rank for rank, digest in digests.items() if digest != first]:
                found.append(Drift(quantity=kind.of(name), step=step, ranks=ranks))
    return found
