"""What a run computed: its parameters, gradients and losses, step by step, brought together on rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from torch import Tensor

from meshmark.judge.deviation import Drift, Tensors


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
    buffers: list[list[Tensors]] = field(default_factory=list)
    """By replica, then like `parameters`; empty where the workload has none."""


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
    digests = [tensor_digests(own.parameters), tensor_digests(own.gradients)]
    everyone: list[list[list[dict[str, str]]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, digests)
    mine = Trace(
        parameters=_owned(own.parameters, [e[0] for e in everyone]),
        gradients=_owned(own.gradients, [e[1] for e in everyone]),
        losses=own.losses,
        norms=own.norms,
        evaluations=own.evaluations,
        buffers=own.buffers,
    )
    traces: list[Trace] | None = [Trace()] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, traces)
    if traces is None:
        return None, [], 0
    reported = [trace.norms for trace in traces]
    union = Trace(
        parameters=[_union(parts) for parts in zip(*(t.parameters for t in traces), strict=True)],
        gradients=[_union(parts) for parts in zip(*(t.gradients for t in traces), strict=True)],
        losses=[sum(shares) for shares in zip(*(t.losses for t in traces), strict=True)],
        norms=[next((n for n in norms if n is not None), None) for norms in zip(*reported, strict=True)],
        evaluations=[sum(shares) for shares in zip(*(t.evaluations for t in traces), strict=True)],
        buffers=[replica for t in traces for replica in t.buffers],
    )
    drifts = _drifts("parameters", [e[0] for e in everyone]) + _drifts("gradients", [e[1] for e in everyone])
    num_told = sum(len(tensors) for kinds in everyone for steps in kinds for tensors in steps)
    num_held = sum(len(tensors) for tensors in [*union.parameters, *union.gradients])
    return union, drifts, num_told - num_held


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


def _drifts(kind: str, everyone: list[list[dict[str, str]]]) -> list[Drift]:
    found = []
    for step in range(len(everyone[0])):
        names = {name for held in everyone for name in held[step]}
        for name in sorted(names):
            digests = {rank: held[step][name] for rank, held in enumerate(everyone) if name in held[step]}
            first = digests[min(digests)]
            if ranks := [rank for rank, digest in digests.items() if digest != first]:
                found.append(Drift(quantity=f"{kind}/{name}", step=step, ranks=ranks))
    return found
