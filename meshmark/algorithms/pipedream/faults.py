"""How pipelines that do not wait are got wrong: which versions of the weights gradients are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from meshmark.algorithms.contract import FaultHypothesis, GradientHypothesis, Synchronous, Tensors, UpdateRule
from meshmark.algorithms.pipedream.pipemare import PipeMareRule
from meshmark.algorithms.pipedream.schedule import (
    ByMicroBatch,
    ByStep,
    Versions,
    in_flight,
    of_first_stage,
)
from meshmark.spec.layout import Layout
from meshmark.spec.workload import Workload


class NotCorrected(PipeMareRule):
    def discrepancy(self, index: int, delay: int) -> int:
        return 0


class OfForwardPasses(PipeMareRule):
    def passed_back(self, ahead: Tensors, newest: Tensors, index: int, delays: dict[str, int]) -> Tensors:
        return ahead


class OneTooLate(PipeMareRule):
    def discrepancy(self, index: int, delay: int) -> int:
        return super().discrepancy(index, delay) + 1


class AsIfNeverFlushed(PipeMareRule):
    def discrepancy(self, index: int, delay: int) -> int:
        return delay


class VelocityForgotten(PipeMareRule):
    def velocity_at_start(self, here: Tensors) -> Tensors:
        return {name: 0 * x for name, x in here.items()}


class OneDecay(PipeMareRule):
    def decay(self, delay: int) -> float:
        return self.discrepancy_decay


class NotRescheduled(PipeMareRule):
    def power(self) -> float:
        return 0.0


class NeverAnnealed(PipeMareRule):
    def power(self) -> float:
        return 1.0


_PIPEMARE: dict[type[PipeMareRule], str] = {
    NotCorrected: "backward passes take the newest weights, without the correction of the discrepancy",
    OfForwardPasses: "backward passes take the weights of the forward passes, which PipeMare does not stash",
    OneTooLate: "the discrepancy is corrected for an update too many",
    AsIfNeverFlushed: "the discrepancy is corrected for updates from before the pipeline was flushed",
    VelocityForgotten: "the velocity of the weights is forgotten between steps",
    OneDecay: "the velocity of the weights decays as if every stage were one update late",
    NotRescheduled: "learning rates are not rescheduled: early stages start with the whole rate",
    NeverAnnealed: "learning rates of early stages stay divided by their delay: they are not annealed",
}


def pipemare_faults(workload: Workload, layout: Layout) -> Iterator[GradientHypothesis]:
    for wrong, how in _PIPEMARE.items():
        yield GradientHypothesis(how, partial(wrong, workload, layout))


def micro_batch_faults(right: ByMicroBatch, other: str) -> Iterator[GradientHypothesis]:
    """Yield wrong versions of PipeDream; `other` is the kind that `right` is not, of those with and without vertical
    synchronisation."""
    depth = right.layout.pp
    versions = of_first_stage if other == "pipedream-vertical" else in_flight
    wrong: dict[str, Versions] = {
        "every micro-batch is of the weights that the step began with": lambda stage, index: 0,
        "every micro-batch is of the newest weights, as if none were on their way": lambda stage, index: index,
        **_shifts(right.versions, -1, range(depth)),
        f"versions are those of {other}": versions(depth),
        **_shifts_of_stages(right.versions, -1, depth),
    }
    yield from _hypotheses(right, wrong)


def step_faults(right: ByStep) -> Iterator[GradientHypothesis]:
    depth = right.layout.pp
    wrong = {**_shifts(right.versions, 1, range(depth)), **_shifts_of_stages(right.versions, 1, depth)}
    yield from _hypotheses(right, wrong)


def _hypotheses(right: ByMicroBatch | ByStep, wrong: dict[str, Versions]) -> Iterator[GradientHypothesis]:
    for how, versions in wrong.items():
        yield GradientHypothesis(how, partial(replace, right, versions=versions))
    how = "backward passes take the newest weights, not those of the forward passes"
    yield GradientHypothesis(how, partial(replace, right, stashed=False))


def _shifts(right: Versions, older: int, stages: range) -> dict[str, Versions]:
    return {
        "weights are a version too old at every stage": _shifted(right, older, stages),
        "weights are a version too new at every stage": _shifted(right, -older, stages),
    }


def _shifts_of_stages(right: Versions, older: int, num_stages: int) -> dict[str, Versions]:
    found = {}
    for stage in range(num_stages):
        alone = range(stage, stage + 1)
        found[f"weights of stage {stage} alone are a version too old"] = _shifted(right, older, alone)
        found[f"weights of stage {stage} alone are a version too new"] = _shifted(right, -older, alone)
    return found


def _shifted(right: Versions, by: int, stages: range) -> Versions:
    return lambda stage, index: max(0, right(stage, index) + by * (stage in stages))


class _OlderUpdated(Synchronous):
    """The right gradients change the weights that they are of, not the newest."""

    before: Tensors | None = None

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        (newest,), (after,) = parameters, super().transition(parameters, gradients)
        before, self.before = self.before or newest, newest
        return [{name: before[name] + (x - newest[name]) for name, x in after.items()}]


def update_faults() -> Iterator[FaultHypothesis]:
    def older(workload: Workload, rules: Sequence[UpdateRule]) -> _OlderUpdated:
        return _OlderUpdated(rules[0])

    yield FaultHypothesis("the update changes the weights of the step before, not the newest", older)
