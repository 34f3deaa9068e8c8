"""FedAvg that meets at another time, or weighs otherwise where it does."""

from __future__ import annotations

from typing import Any

from meshmark.judge.faults import Fault
from tests.broken.engine import Broken
from tests.broken.mutant import of_algorithm


class Weighing(Broken):
    weight: float
    module: Any

    def average(self) -> None:
        super().average()  # type: ignore[misc]


class WeighsAlike(Weighing):
    def average(self) -> None:
        own, self.weight = self.weight, 1 / self.case.layout.dp
        super().average()
        self.weight = own


class WeighsByOthers(Weighing):
    """By the rows of the next replica, of two."""

    def average(self) -> None:
        own, self.weight = self.weight, 1 - self.weight
        super().average()
        self.weight = own


class WeighsTwice(Weighing):
    def average(self) -> None:
        own, self.weight = self.weight, self.weight**2
        super().average()
        self.weight = own


class NeverMeets(Weighing):
    def average(self) -> None:
        """Never."""


class MeetsAStepLate(Weighing):
    steps_done: int

    def prepare(self) -> None:
        self.steps_done = -1


class OwnMeanForGlobal(Weighing):
    """Gradients are those of equal parts."""

    def differentiate(self, loss: Any) -> None:  # noqa: ANN401
        super().differentiate(loss * self.weight * self.case.layout.dp)  # type: ignore[misc]


_NAMED = {
    WeighsAlike: "all replicas weigh alike, however many rows they have",
    WeighsByOthers: "each replica weighs by the rows of the next",
    WeighsTwice: "replicas are weighed by their rows twice",
    NeverMeets: "replicas never meet",
    MeetsAStepLate: "replicas meet a step late",
}
_GRADIENTS = {
    OwnMeanForGlobal: "replica 0 steps on 2, 0 times the replicas' parts of the gradient, where 4, 0 is right"
}
MUTANTS = [
    *of_algorithm("fed-avg", "gpt-mini-sgd-fed-avg2", _NAMED),
    *of_algorithm("fed-avg", "gpt-mini-sgd-fed-avg2", _GRADIENTS, fault=Fault.SCALED),
]
