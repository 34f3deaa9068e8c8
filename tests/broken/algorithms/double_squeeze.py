"""Algorithms that compress to a server and back, and get one thing wrong."""

from __future__ import annotations

from torch import Tensor

from meshmark.adapters.compressed.codecs import CODECS
from meshmark.adapters.compressed.exchange import Messages
from tests.broken.algorithms.compressed import Compressing, Named
from tests.broken.engine import average
from tests.broken.mutant import of_algorithm

SERVERS = "left of server"


class Serving(Compressing):
    """`kept[SERVERS]`: what the server has left."""

    def served(self, every: Messages) -> Tensor:
        found: Tensor = super().served(every)  # type: ignore[misc]
        return found


class ServerForgets(Serving):
    def served(self, every: Messages) -> Tensor:
        self.kept.pop(SERVERS, None)
        return super().served(every)


class ServerAddsTwice(Serving):
    def served(self, every: Messages) -> Tensor:
        for left in self.kept.get(SERVERS, {}).values():
            left.mul_(2)
        return super().served(every)


class ServerSums(Serving):
    def served(self, every: Messages) -> Tensor:
        class Sum(Messages):
            def mean(self) -> Named:
                return self.total()

        every.__class__ = Sum
        return super().served(every)


class ServerSendsAll(Serving):
    """The server sends its values uncompressed."""

    def direction(self, own: Named) -> Named:
        message = self.compressed("left", own)  # type: ignore[attr-defined]
        found: Named = self.read(message, own)  # type: ignore[attr-defined]
        average(found.values())
        return found


class WorkersForget(Serving):
    def direction(self, own: Named) -> Named:
        self.kept.pop("left", None)
        return self.honest(own)


class OneRound(Serving):
    def prepare(self) -> None:
        compressor = self.case.workload.algorithm.compressor
        assert compressor is not None
        self.exchange.codec = CODECS[compressor.kind](compressor)


class VarianceGoesOn(Serving):
    """It adapts to compressed steps too."""

    def direction(self, own: Named) -> Named:
        if self.case.workload.algorithm.compresses(self.steps_done):
            mean = {name: x.clone() for name, x in own.items()}
            average(mean.values())
            self.adapt(mean)  # type: ignore[attr-defined]
        return self.honest(own)


class MomentumLost(Serving):
    """Where the warm-up ends, and after."""

    def direction(self, own: Named) -> Named:
        if self.case.workload.algorithm.compresses(self.steps_done):
            for momentum in self.kept["momentum"].values():
                momentum.zero_()
        return self.honest(own)


class BiasCorrected(Serving):
    """As Adam's is."""

    def direction(self, own: Named) -> Named:
        found, (first, second) = self.honest(own), self.case.workload.optimizer.betas
        steps, warmup = self.steps_done + 1, self.case.workload.algorithm.warmup_steps
        eps, variances = self.case.workload.optimizer.eps, self.kept["variance"]
        for name, x in found.items():
            root = variances[name].sqrt()
            right = root.div((1 - second ** min(steps, warmup)) ** 0.5).add_(eps)
            x.mul_(root.add(eps)).div_(right).div_(1 - first**steps)
        return found


class AdaptsLonger(Serving):
    """By a step."""

    def direction(self, own: Named) -> Named:
        if self.steps_done != self.case.workload.algorithm.warmup_steps:
            return self.honest(own)
        average(own.values())
        self.adapt(own)  # type: ignore[attr-defined]
        moved: Named = self.moved(own)  # type: ignore[attr-defined]
        self.kept["momentum"] = moved
        variances = self.kept["variance"]
        return {n: self.preconditioned(m, variances[n]) for n, m in moved.items()}  # type: ignore[attr-defined]


_SERVER = {
    ServerForgets: "what the server has left is forgotten",
    ServerAddsTwice: "what the server has left is added twice",
    ServerSums: "the sum over replicas, not their mean",
    ServerSendsAll: "the server sends its mean as it is",
    WorkersForget: "what is left is forgotten",
}
_ONE_BIT_ADAM = {
    VarianceGoesOn: "the variance goes on after the warm-up",
    MomentumLost: "the momentum is reset",
    BiasCorrected: "moments are corrected for their bias",
    AdaptsLonger: "the warm-up is a step longer",
}
MUTANTS = [
    *of_algorithm("compressed", "gpt-mini-sgd-double-squeeze-top-k10", _SERVER),
    *of_algorithm("compressed", "gpt-mini-sgd-double-squeeze-signx3", {OneRound: "one round of compression"}),
    *of_algorithm("compressed", "gpt-mini-adam-one-bit-adam-signw2", _ONE_BIT_ADAM),
]
