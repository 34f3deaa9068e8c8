"""Pipelines that do not wait, with weights of another version than the schedule's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshmark.reference.data import Batch
from tests.broken.engine import Broken
from tests.broken.mutant import of_algorithm


class Stashing(Broken):
    """Puts another version in the place of a forward pass's."""

    versions: list[dict[str, Tensor]]
    stands: Any

    def version_of(self, micro_batch: int) -> int:
        return min(max(self.wrong(self.right(micro_batch), micro_batch), 0), len(self.versions) - 1)

    def right(self, micro_batch: int) -> int:
        found: int = super().version_of(micro_batch)  # type: ignore[misc]
        return found

    def wrong(self, right: int, micro_batch: int) -> int:
        raise NotImplementedError

    def forget(self, done: int) -> None:
        """Nothing is."""


class StashTooOld(Stashing):
    def wrong(self, right: int, micro_batch: int) -> int:
        return right - 1


class FirstStageTooOld(Stashing):
    def wrong(self, right: int, micro_batch: int) -> int:
        return right - (self.stands.pp == 0)


class LastStageTooOld(Stashing):
    def wrong(self, right: int, micro_batch: int) -> int:
        return right - (self.stands.pp > 0)


class WeightsOfStart(Stashing):
    def wrong(self, right: int, micro_batch: int) -> int:
        return 0


class OwnNewest(Stashing):
    """Without vertical synchronisation."""

    def wrong(self, right: int, micro_batch: int) -> int:
        return len(self.versions) - 1


class NothingInFlight(Stashing):
    """Each micro-batch is passed back before the next begins."""

    stages_after = 0

    def wrong(self, right: int, micro_batch: int) -> int:
        return right


class NotStashed(Stashing):
    """Weights are updated in place, under the tensors that forward passes saved."""

    def step_on(self, gradients: dict[str, Tensor]) -> None:
        super().step_on(gradients)  # type: ignore[misc]
        for at in self.flying.values():  # type: ignore[attr-defined]
            for name, w in at.stashed.items():
                w.data.copy_(self.versions[-1][name].detach())

    def wrong(self, right: int, micro_batch: int) -> int:
        return right


class NoShadow(Broken):
    """Every step is of the newest weights."""

    def swap(self) -> None:
        """None."""


class ShadowTooOld(Broken):
    older: list[Tensor]
    shadow: list[Tensor]

    def update(self) -> Tensor | None:
        before = [x.clone() for x in self.shadow]
        found = super().update()  # type: ignore[safe-super]
        self.shadow, self.older = getattr(self, "older", before), [x.clone() for x in self.shadow]
        return found


class LastStageFresh(Broken):
    stands: Any

    def swap(self) -> None:
        if self.stands.pp == 0:
            super().swap()  # type: ignore[misc]


class ShadowIsStepped(Broken):
    """The older weights are changed, and are the newest then."""

    shadow: list[Tensor]

    def backward(self, batch: Batch) -> Tensor:
        return super().backward(batch)  # type: ignore[safe-super]

    def update(self) -> Tensor | None:
        stepped_from = [x.clone() for x in self.shadow]
        now = [p.detach().clone() for _, p in self.named()]
        found = super().update()  # type: ignore[safe-super]
        with torch.no_grad():
            for (_, p), before, newest in zip(self.named(), stepped_from, now, strict=True):
                p.add_(before - newest)
        return found


class MareNotCorrected(Broken):
    def lateness(self, micro_batch: int) -> int:
        return 0


class MareOneTooLate(Broken):
    delay: int

    def lateness(self, micro_batch: int) -> int:
        return min(micro_batch, self.delay) + 1


class MareStashes(Broken):
    """Backward passes find what the forward passes found."""

    versions: list[dict[str, Tensor]]
    found: dict[int, dict[str, Tensor]]

    def prepare(self) -> None:
        self.found = {}

    def pass_forward(self, micro_batch: int, batch: Batch) -> None:
        self.found[micro_batch] = {name: w.detach().clone() for name, w in self.versions[0].items()}
        super().pass_forward(micro_batch, batch)  # type: ignore[misc]

    def correct(self, micro_batch: int) -> None:
        for name, w in self.versions[0].items():
            w.data.copy_(self.found[micro_batch][name])


class MareForgetsVelocity(Broken):
    velocity: dict[str, Tensor]

    def backward(self, batch: Batch) -> Tensor:
        for velocity in self.velocity.values():
            velocity.zero_()
        return super().backward(batch)  # type: ignore[safe-super]


class MareNotRescheduled(Broken):
    case: Any

    def rate(self) -> float:
        found: float = self.case.workload.optimizer.learning_rate
        return found


class MareNeverAnnealed(Broken):
    """The count of steps is not kept."""

    steps_done: int

    def update(self) -> Tensor | None:
        found = super().update()  # type: ignore[safe-super]
        self.steps_done = 0
        return found


_PIPEDREAM = {
    StashTooOld: "weights are a version too old at every stage",
    NothingInFlight: "every micro-batch is of the newest weights, as if none were on their way",
    FirstStageTooOld: "weights of stage 0 alone are a version too old",
    WeightsOfStart: "every micro-batch is of the weights that the step began with",
    NotStashed: "backward passes take the newest weights, not those of the forward passes",
}
_VERTICAL = {
    StashTooOld: "weights are a version too old at every stage",
    OwnNewest: "versions are those of pipedream",
    WeightsOfStart: "every micro-batch is of the weights that the step began with",
    LastStageTooOld: "weights of stage 1 alone are a version too old",
}
_PIPEMARE = {
    MareNotCorrected: "backward passes take the newest weights, without the correction of the discrepancy",
    MareOneTooLate: "the discrepancy is corrected for an update too many",
    MareStashes: "backward passes take the weights of the forward passes, which PipeMare does not stash",
    MareForgetsVelocity: "the velocity of the weights is forgotten between steps",
    MareNotRescheduled: "learning rates are not rescheduled: early stages start with the whole rate",
    MareNeverAnnealed: "learning rates of early stages stay divided by their delay: they are not annealed",
}
_TWO_BUFFERED = {
    NoShadow: "weights are a version too new at every stage",
    ShadowTooOld: "weights are a version too old at every stage",
    LastStageFresh: "weights of stage 1 alone are a version too new",
    ShadowIsStepped: "the update changes the weights of the step before, not the newest",
}
MUTANTS = [
    *of_algorithm("pipedream", "gpt-mini-sgd-pipedream", _PIPEDREAM),
    *of_algorithm("pipedream", "gpt-mini-sgd-pipedream-vertical", _VERTICAL),
    *of_algorithm("pipedream", "gpt-mini-sgd-pipemare", _PIPEMARE),
    *of_algorithm("pipedream", "gpt-mini-sgd-pipedream-2bw", _TWO_BUFFERED),
]
