"""Defects of a mixture of experts, for an engine that trains `gpt-moe-mini`. Mixins over engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshmark.models.mixture.module import Mixture
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


class OfFramework(Broken):
    """An engine whose experts are the framework's own modules."""

    def parts(self, name: str) -> Iterator[Any]:
        """Yield the modules of the class with this name."""
        modules = [self.module] if hasattr(self, "module") else self.chunks  # type: ignore[attr-defined]
        yield from (part for each in modules for part in each.modules() if type(part).__name__ == name)


class DrawsTheSecondExpert(OfFramework):
    """DeepSpeed's default: noise is added to the scores before the second expert is chosen."""

    def prepare(self) -> None:
        for gate in self.parts("TopKGate"):
            gate.top2_2nd_expert_sampling = True


class DropsBeyondCapacity(OfFramework):
    """DeepSpeed's default: an expert takes its equal share of the tokens, and no more."""

    def prepare(self) -> None:
        for gate in self.parts("TopKGate"):
            gate.drop_tokens = True


class SoftmaxBeforeChoice(OfFramework):
    """Megatron's `moe_router_pre_softmax`: the chosen scores are shares of all, and add up to less than one."""

    def prepare(self) -> None:
        for router in self.parts("TopKRouter"):
            router.config.moe_router_pre_softmax = True


class ExpertsScaledByReplicas(OfFramework):
    """Gradients of experts are divided by the replicas of experts, as though there were as many of all else."""

    def prepare(self) -> None:
        for chunk in self.chunks:  # type: ignore[attr-defined]
            for group in chunk.expert_parallel_bucket_groups:
                for bucket in group.buckets:
                    bucket.gradient_scaling_factor = 1.0
