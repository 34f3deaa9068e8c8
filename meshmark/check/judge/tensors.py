"""Arithmetic of named tensors that several parts of the judge need."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshmark.check.gradients import LEFT_OVER


def equal(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return first.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in first.items())


def equal_at(name: str, first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return name in first and name in other and torch.equal(first[name], other[name])


def all_equal(replicas: Mapping[int, Mapping[str, Tensor]]) -> bool:
    first, *others = replicas.values()
    return all(equal(first, other) for other in others)


def is_near(own: Tensor, right: Tensor, allowed: float) -> bool:
    return float((own - right).norm()) <= allowed * float(right.norm())


def farthest(own: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest relative distance of a tensor from the right one. All are in one format.

    A tensor may be far smaller than others, and Adam moves it as far.
    """
    far = 0.0
    for name, x in right.items():
        tiny = torch.finfo(own[name].dtype).tiny * max(1, x.numel()) ** 0.5
        distance = max(0.0, float((own[name].double() - x).norm()) - tiny)
        far = max(far, distance / (float(x.norm()) or 1.0) if distance else 0.0)
    return far


def cosine(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the cosine of the angle between two gradients."""
    product = sum(float((own[n] * x).sum()) for n, x in other.items() if n in own)
    return product / ((norm_of(own) * norm_of(other)) or 1.0)


def multiple(own: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the multiple of `other` that is nearest to `own`, and the norm of the rest; 0 if `other` is all zero."""
    factor = float(own @ other / (other @ other)) if other.any() else 0.0
    return factor, float((own - factor * other).norm())


def is_multiple(own: Mapping[str, Tensor], other: Mapping[str, Tensor], names: list[str]) -> bool:
    """Return whether the gradients of `names` are those of `other`, also if the script then scales them down."""
    if not all(n in own and n in other for n in names):
        return False
    flat = flattened(own, names)
    scale, left = multiple(flat, flattened(other, names))
    return 0.0 < scale < 1.0 + LEFT_OVER and left <= LEFT_OVER * float(flat.norm())


def flattened(tensors: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[n].double().reshape(-1) for n in names])


def norm_of(tensors: Mapping[str, Tensor], order: float = 2.0) -> float:
    """Return the norm of all tensors together, as `torch.nn.utils.clip_grad_norm_` defines it."""
    norms = [torch.linalg.vector_norm(t.double(), order) for t in tensors.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms), order)) if norms else 0.0
