"""What goes wrong with a mixture of experts, of an engine that trains `gpt-moe-mini`. Mixins over engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from meshmark.reference.mixture import Mixture
from tests.broken.engine import Broken


def _mixtures(engine: Broken) -> Iterator[Mixture]:
    yield from (module for module in engine.modules() if isinstance(module, Mixture))


class RoutesToOne(Broken):
    """Top-1 in the place of top-2: the softmax of one score is one, and no gate learns."""

    def prepare(self) -> None:
        for mixture in _mixtures(self):
            mixture.experts_per_token = 1


class WeighsOverAll(Broken):
    """The softmax over all experts' scores, of which the chosen two add up to less than one."""

    def prepare(self) -> None:
        for mixture in _mixtures(self):
            mixture.weigh = lambda chosen: chosen.exp() / self.total  # type: ignore[method-assign, assignment]
            mixture.gate.register_forward_hook(self.note)

    def note(self, module: torch.nn.Module, inputs: tuple[Tensor], scores_NE: Tensor) -> None:
        self.total = scores_NE.exp().sum(-1, keepdim=True)


class ExpertsSwapped(Broken):
    """Two experts of one layer stand in each other's place when tokens come, as where ranks deal them out by another
    order."""

    def prepare(self) -> None:
        mixture = list(_mixtures(self))[-1]
        mixture.router = lambda scores_NE: _swap(mixture.route(scores_NE))


def _swap(chosen_NK: Tensor) -> Tensor:
    return torch.where(chosen_NK == 0, 1, torch.where(chosen_NK == 1, 0, chosen_NK))


class GateLearnsNothing(Broken):
    """Weights are taken for constants, so that gates have a gradient of zero."""

    def prepare(self) -> None:
        for mixture in _mixtures(self):
            mixture.weigh = lambda chosen: F.softmax(chosen.detach(), dim=-1) + 0 * chosen  # type: ignore[method-assign]


class DropsTokens(Broken):
    """Every expert has a capacity, an even share of the tokens' choices, and what comes later is lost."""

    def prepare(self) -> None:
        for mixture in _mixtures(self):
            WithinCapacity(mixture)


class WithinCapacity:
    """In the place of a mixture's router and of its weights."""

    def __init__(self, mixture: Mixture) -> None:
        self.route, self.weigh = mixture.route, mixture.weigh
        mixture.router, mixture.weigh = self.choose, self.keep  # type: ignore[method-assign]

    def choose(self, scores_NE: Tensor) -> Tensor:
        chosen_NK, num_experts = self.route(scores_NE), scores_NE.shape[-1]
        place_NKE = F.one_hot(chosen_NK, num_experts).flatten(0, 1).cumsum(0).view(*chosen_NK.shape, num_experts)
        place_NK = place_NKE.gather(2, chosen_NK[..., None]).squeeze(2)
        self.kept_NK = place_NK <= chosen_NK.numel() // num_experts
        return chosen_NK

    def keep(self, scores_NK: Tensor) -> Tensor:
        return self.weigh(scores_NK) * self.kept_NK


class OneTokenElsewhere(Broken):
    """In one layer the token whose second and third score are nearest to each other goes to the third."""

    def prepare(self) -> None:
        mixture = list(_mixtures(self))[0]

        def route(scores_NE: Tensor) -> Tensor:
            best = scores_NE.topk(3, dim=-1)
            gaps = best.values[:, 1] - best.values[:, 2]
            chosen = best.indices[:, :2].clone()
            chosen[gaps.argmin(), 1] = best.indices[gaps.argmin(), 2]
            return chosen

        mixture.router = route
