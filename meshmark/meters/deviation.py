"""How far a run's tensors are from the truth's, tensor by tensor and step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmark.errors import AdapterError


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One tensor at one step against the truth x: all norms are L2, in float64."""

    distance: float
    """||y - x||."""
    truth_norm: float
    """||x||."""
    factor: float
    """<y, x> / ||x||^2: y is about this multiple of the truth."""
    digest: str
    """Of y's bytes: equal for replicas that are bitwise equal."""


def measure(tensors: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, Deviation]:
    """Deviation of every tensor by name. Raises `AdapterError` for a name or shape that the truth does not have."""
    return {name: _deviation(name, tensor, truth) for name, tensor in tensors.items()}


def _deviation(name: str, tensor: Tensor, truth: Mapping[str, Tensor]) -> Deviation:
    if name not in truth:
        raise AdapterError(f"the engine returned a tensor {name!r}; the canonical names are {', '.join(truth)}")
    x = truth[name]
    if tensor.shape != x.shape:
        raise AdapterError(
            f"the engine returned {name!r} with shape {tuple(tensor.shape)}; the full shape is {tuple(x.shape)}"
        )
    own = tensor.detach().cpu().contiguous()
    y = own.double()
    norm = float(torch.linalg.vector_norm(x))
    return Deviation(
        distance=float(torch.linalg.vector_norm(y - x)),
        truth_norm=norm,
        factor=float(torch.sum(y * x)) / norm**2 if norm else 0.0,
        digest=hashlib.blake2b(own.view(torch.uint8).numpy().data, digest_size=8).hexdigest(),
    )
