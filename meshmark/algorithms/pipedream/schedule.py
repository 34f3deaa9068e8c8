"""Pipelines that do not wait: a gradient is of older weights than those that it changes. Stage s of p, counted from 0.

- PipeDream (arXiv:1806.03377, section 3.3): each micro-batch makes an update of its own, and the pipeline is flushed at
  the end of a step. Micro-batch b finds at stage s the weights after max(0, b - (p - 1 - s)) of the step's updates,
  and stashes them for its backward pass: w_{b+1} = w_b - r grad f_b(w^1_{b-p+1}, ..., w^p_b)
- with vertical synchronisation (the same section): at every stage the version that the first stage had
- PipeDream-2BW (arXiv:2006.09503, section 3.1): w_{t+1} = w_t - step(grad f(w_{t-1})), two versions being kept

f_b is the micro-batch's share of the global loss, so that what all change is a step of r by the mean gradient. What a
step is made of is the sum of its micro-batches' gradients, wherever each was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshmark.algorithms.contract import Compute, PipelinedStep, Tensors, combined
from meshmark.spec.layout import Layout
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from meshmark.reference.data import Batch

Versions = Callable[[int, int], int]
"""From a stage and a micro-batch to how many updates of the step its weights have seen; under PipeDream-2BW, to how
many steps old they are."""


def in_flight(num_stages: int) -> Versions:
    """Return PipeDream's versions: the weights that a micro-batch finds at each stage."""
    return lambda stage, micro_batch: max(0, micro_batch - (num_stages - 1 - stage))


def of_first_stage(num_stages: int) -> Versions:
    """Return the versions of PipeDream with vertical synchronisation."""
    return lambda stage, micro_batch: max(0, micro_batch - (num_stages - 1))


def of_step_before(num_stages: int) -> Versions:
    """Return the versions of PipeDream-2BW."""
    return lambda stage, micro_batch: 1


@dataclass(frozen=True, kw_only=True)
class ByMicroBatch:
    """The gradient rule of PipeDream: every micro-batch makes an update of its own."""

    workload: Workload
    layout: Layout
    versions: Versions
    stashed: bool = True
    """Whether a backward pass uses the weights of its forward pass. If not, it uses the newest, which is wrong."""

    def step(self, history: Sequence[Tensors], batch: Batch, compute: Compute) -> PipelinedStep:
        stages = self.workload.transformer.stages_of(self.layout.pp, history[-1])
        rate = self.workload.optimizer.learning_rate
        total: Tensors | None = None
        made, losses = [history[-1]], 0.0
        for index, part in enumerate(batch.micro_batches(self.layout.num_micro_batches)):
            here = {name: made[min(self.versions(stage, index), index)][name] for name, stage in stages.items()}
            loss, own = compute(here, part, None if self.stashed else made[index])
            losses += loss
            total = combined((1, total), (1, own)) if total else own
            made.append({**made[-1], **combined((1, {name: made[-1][name] for name in own}), (-rate, own))})
        assert total is not None
        return PipelinedStep(loss=losses, gradients=total, after=made[-1])


@dataclass(frozen=True, kw_only=True)
class ByStep:
    """The gradient rule of PipeDream-2BW: the step makes one update, of gradients at older weights."""

    workload: Workload
    layout: Layout
    versions: Versions
    stashed: bool = True
    """As under `ByMicroBatch`."""

    def step(self, history: Sequence[Tensors], batch: Batch, compute: Compute) -> PipelinedStep:
        stages, last = self.workload.transformer.stages_of(self.layout.pp, history[-1]), len(history) - 1
        here = {n: history[-1 - min(self.versions(stage, 0), last)][n] for n, stage in stages.items()}
        loss, gradients = compute(here, batch, None if self.stashed else history[-1])
        return PipelinedStep(loss=loss, gradients=gradients, after=None)
