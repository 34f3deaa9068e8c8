"""1-bit LAMB and 0/1 Adam that get one thing wrong; what breaks 1-bit Adam too is in `serving`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.broken.algorithms.compressed import Named
from tests.broken.algorithms.double_squeeze import Serving
from tests.broken.mutant import of_algorithm


class RatesStay(Serving):
    def grown(self, name: str) -> float:
        return 1.0


class RatesOfNorms(Serving):
    """LAMB's, in every step."""

    def adapted(self, name: str) -> float:
        x, (update, _) = dict(self.named())[name].detach(), self.updates()[name]
        found: float = self.trusted(name, x, update)  # type: ignore[attr-defined]
        return found

    def updates(self) -> dict[str, tuple[Tensor, Tensor]]:
        found, optimizer = {}, self.case.workload.optimizer
        for name, x in self.named():
            if name in self.kept["momentum"]:
                variance = self.kept["variance"][name]
                update = self.preconditioned(self.kept["momentum"][name], variance)  # type: ignore[attr-defined]
                decay = optimizer.weight_decay * optimizer.decays(name)
                found[name] = (update.add(x.detach(), alpha=decay), variance)
        return found


class RatesOfLast(Serving):
    """Rates of the warm-up's last step are taken for their running mean."""

    rates: dict[str, Any]

    def trusted(self, name: str, x: Tensor, update: Tensor) -> float:
        found: float = super().trusted(name, x, update)  # type: ignore[misc]
        self.rates[name].average = found
        return found


class MeanRatio(Serving):
    def grown(self, name: str) -> float:
        variance, fresh = self.kept["variance"][name], self.kept["fresh"][name]
        eps = self.case.workload.optimizer.eps
        ratios = variance.sqrt().add(eps).div(fresh.sqrt().add(eps))[variance > 0]
        return ratios.mean().item() if ratios.numel() else 0.0


class MeetsAlways(Serving):
    """After every step."""

    @torch.no_grad()
    def update(self) -> Tensor | None:
        norm = super().update()  # type: ignore[safe-super]
        if not self.case.workload.algorithm.compresses(self.steps_done - 1):
            self.meet()
        return norm

    def meet(self) -> None:
        super().meet()  # type: ignore[misc]


class MomentaStay(MeetsAlways):
    """Where replicas meet."""

    def update(self) -> Tensor | None:
        return super(MeetsAlways, self).update()

    def meet(self) -> None:
        own = self.kept["momentum"]
        super().meet()
        self.kept["momentum"] = own


class OfLastRate(MomentaStay):
    since: float

    def meet(self) -> None:
        (self.since,) = {group["lr"] for group in self.optimizer.param_groups}  # type: ignore[attr-defined]
        super(MomentaStay, self).meet()


class StepsStay(MomentaStay):
    """The steps that the replica took by itself are not taken back."""

    def meet(self) -> None:
        for name, x in self.named():
            if name in self.kept["met"]:
                self.kept["met"][name].copy_(x)
        super(MomentaStay, self).meet()


class CountsAgain(MomentaStay):
    """The steps before the meeting are counted again."""

    def meet(self) -> None:
        stepped = {name: u.clone() for name, u in self.kept["stepped"].items()}
        super(MomentaStay, self).meet()
        self.kept["stepped"] = stepped


class AdaptsAlways(Serving):
    """The variance moves in every step."""

    def direction(self, own: Named) -> Named:
        if self.steps_done and not self.case.workload.algorithm.adapts(self.steps_done):
            self.adapt(self.mean(own))  # type: ignore[attr-defined]
        return self.honest(own)


_LAMB = {
    RatesStay: "rates of tensors stay as the warm-up left them",
    RatesOfNorms: "rates of tensors are of this step's norms, not of the warm-up's",
    RatesOfLast: "rates of tensors are the warm-up's last, not their running mean",
    MeanRatio: "rates of tensors go by the mean ratio of variances, not the largest",
}
_ZERO_ONE_ADAM = {
    MeetsAlways: "replicas meet after every step",
    MomentaStay: "momenta stay each replica's own where all meet",
    OfLastRate: "the momentum is what was stepped by over the last rate, not over the sum of rates",
    StepsStay: "what a replica has stepped by itself is not taken back",
    CountsAgain: "what was stepped by is counted again after the meeting",
    AdaptsAlways: "the variance moves in every step",
}
MUTANTS = [
    *of_algorithm("compressed", "gpt-mini-unclipped-lamb-one-bit-lamb-signw2", _LAMB),
    *of_algorithm("compressed", "gpt-mini-plain-adam-zero-one-adam2-signw2", _ZERO_ONE_ADAM),
]
