"""Experts whose scores nearly tie: float64 makes the same choice as the run.

Two correct runs of a mixture of experts may send a token to different experts if the last chosen and the first not
chosen expert have equal scores up to rounding. Both are then right. The run's gradients show which it took: ties are
decided one by one, the closest first, by what brings the truth nearer to the run. A token sent elsewhere for more than
rounding stays where float64 sends it, and is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from torch import Tensor

from meshmark.judge.deviation import Tensors
from meshmark.reference.build import skeleton
from meshmark.reference.mixture import Mixture
from meshmark.spec.workload import Workload

NEAR = 2.0**-18
"""Share of a layer's largest score. Two scores closer than this tie.

In float32 a score was off by up to 4.6e-7 of it, an eighth of this, in 200 steps of `gpt-moe-mini`.
"""
MOST_TIES = 6
"""Most ties that are decided per step. Of the 512 choices in a step of `gpt-moe-mini`, 0.01 tie."""
Tie = tuple[str, int]
"""Layer and token."""
Computed = TypeVar("Computed")


@dataclass
class _Routing:
    """Routing of all tokens of a forward pass."""

    swapped: frozenset[Tie] = frozenset()
    """Ties that go to the expert with the slightly lower score."""
    gaps: dict[Tie, float] = field(default_factory=dict)
    """Gaps of all ties, as a share of the largest score."""

    def choose(self, layer: str, scores_NE: Tensor, experts_per_token: int) -> Tensor:
        best = scores_NE.detach().topk(experts_per_token + 1, dim=-1)
        gap_N = (best.values[:, -2] - best.values[:, -1]) / scores_NE.detach().abs().max()
        chosen_NK = best.indices[:, :-1].clone()
        for token in (gap_N < NEAR).nonzero().flatten().tolist():
            self.gaps[layer, token] = float(gap_N[token])
            if (layer, token) in self.swapped:
                chosen_NK[token, -1] = best.indices[token, -1]
        return chosen_NK


@contextlib.contextmanager
def _routed(workload: Workload, routing: _Routing) -> Iterator[None]:
    """Make the truth's model choose experts by `routing`."""
    mixtures = [(name, m) for name, m in skeleton(workload.model).named_modules() if isinstance(m, Mixture)]

    def choosing(name: str, mixture: Mixture) -> Callable[[Tensor], Tensor]:
        return lambda scores_NE: routing.choose(name, scores_NE, mixture.experts_per_token)

    for name, mixture in mixtures:
        mixture.router = choosing(name, mixture)
    try:
        yield
    finally:
        for _, mixture in mixtures:
            mixture.router = None


def followed(
    workload: Workload, own: Tensors, compute: Callable[[], Computed], gradients: Callable[[Computed], Tensors]
) -> Computed:
    """Return what `compute` finds in float64 with the tie choices closest to a run with gradients `own`."""

    def attempt(swapped: frozenset[Tie]) -> tuple[Computed, dict[Tie, float]]:
        routing = _Routing(swapped)
        with _routed(workload, routing):
            return compute(), routing.gaps

    swapped = frozenset[Tie]()
    best, gaps = attempt(swapped)
    decided = set[Tie]()
    while len(decided) < MOST_TIES and (open_ties := gaps.keys() - decided):
        tie = min(open_ties, key=lambda t: gaps[t])
        decided.add(tie)
        other, other_gaps = attempt(swapped | {tie})
        if _distance(own, gradients(other)) < _distance(own, gradients(best)):
            swapped, best, gaps = swapped | {tie}, other, other_gaps
    return best


def _distance(own: Tensors, exact: Tensors) -> float:
    """Return the sum over gradients of their squared relative distances."""
    return sum(
        float(np.sum(np.square(own[name].astype(np.float64) - x)) / (np.sum(np.square(x)) or 1.0))
        for name, x in exact.items()
        if name in own
    )
