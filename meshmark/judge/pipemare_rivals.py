"""What PipeMare is made by mistake: each a run by other equations."""

from __future__ import annotations

from meshmark.algorithms.pipemare import PipeMare
from meshmark.algorithms.replicas import Tensors


class NotCorrected(PipeMare):
    def discrepancy(self, index: int, delay: int) -> int:
        return 0


class OfForwardPasses(PipeMare):
    def passed_back(self, ahead: Tensors, newest: Tensors, index: int, delays: dict[str, int]) -> Tensors:
        return ahead


class OneTooLate(PipeMare):
    def discrepancy(self, index: int, delay: int) -> int:
        return super().discrepancy(index, delay) + 1


class AsIfNeverFlushed(PipeMare):
    def discrepancy(self, index: int, delay: int) -> int:
        return delay


class VelocityForgotten(PipeMare):
    def velocity_at_start(self, here: Tensors) -> Tensors:
        return {name: 0 * x for name, x in here.items()}


class OneDecay(PipeMare):
    def decay(self, delay: int) -> float:
        return self.workload.algorithm.discrepancy_decay


class NotRescheduled(PipeMare):
    def power(self) -> float:
        return 0.0


class NeverAnnealed(PipeMare):
    def power(self) -> float:
        return 1.0


PIPEMARE_RIVALS = {
    NotCorrected: "backward passes take the newest weights, without the correction of the discrepancy",
    OfForwardPasses: "backward passes take the weights of the forward passes, which PipeMare does not stash",
    OneTooLate: "the discrepancy is corrected for an update too many",
    AsIfNeverFlushed: "the discrepancy is corrected for updates from before the pipeline was flushed",
    VelocityForgotten: "the velocity of the weights is forgotten between steps",
    OneDecay: "the velocity of the weights decays as if every stage were one update late",
    NotRescheduled: "learning rates are not rescheduled: early stages start with the whole rate",
    NeverAnnealed: "learning rates of early stages stay divided by their delay: they are not annealed",
}
"""Each with what it says of a run that it explains."""
