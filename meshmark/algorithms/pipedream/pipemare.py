"""PipeMare (arXiv:1910.05124): a pipeline that stashes nothing, at every stage of which each micro-batch makes an
update of its own. Stage s of p, counted from 0, is passed back d_s = 2 (p - 1 - s) + 1 updates after its forward pass
(section 2.1, of minibatches of one micro-batch), fewer after a flush, which is where a step begins: d_sb = min(b, d_s)
in micro-batch b.

- w_{b+1} = w_b - r_s grad f_b(u, v): forward passes are of u = w_{b - d_sb}, backward passes of v
- learning-rate rescheduling (section 3.1): r_s = r / d_s^q, q = 1 - min(t / K, 1) in step t, counted from 0
- discrepancy correction (section 3.2): v = w_b - d_sb m, m <- D_s m + (1 - D_s) (w_{b+1} - w_b), D_s = D^(1 / d_s)

m starts at zero and is kept from step to step. A synchronous warm-up (section 3.3) is training by another engine. f_b
is the micro-batch's share of the global loss, and the rate is one within a step: so a step is one of r_s by the sum of
its micro-batches' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.contract import Compute, PipelinedStep, Synchronous, Tensors, UpdateRule, combined
from meshmark.algorithms.pipedream import PipeMare
from meshmark.spec.layout import Layout
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from meshmark.reference.data import Batch


def delay(num_stages: int, stage: int) -> int:
    """d_s."""
    return 2 * (num_stages - 1 - stage) + 1


def rate_power(workload: Workload, step: int) -> float:
    """q."""
    return 1 - min(step / cast(PipeMare, workload.algorithm).annealing_steps, 1)


class PipeMareRule:
    """The gradient rule of one run; m is made of all updates so far."""

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self.workload, self.layout = workload, layout
        self.discrepancy_decay = cast(PipeMare, workload.algorithm).discrepancy_decay
        self.velocity: Tensors = {}
        """m; empty before the first update."""
        self.steps = 0

    def step(self, history: Sequence[Tensors], batch: Batch, compute: Compute) -> PipelinedStep:
        here = history[-1]
        stages = self.workload.transformer.stages_of(self.layout.pp, here)
        delays = {name: delay(self.layout.pp, stage) for name, stage in stages.items()}
        made, losses = [here], 0.0
        total: Tensors = {}
        self.velocity = self.velocity_at_start(here)
        for index, part in enumerate(batch.micro_batches(self.layout.num_micro_batches)):
            ahead = {name: made[index - min(index, d)][name] for name, d in delays.items()}
            loss, own = compute(ahead, part, self.passed_back(ahead, made[index], index, delays))
            moves = {n: -self.rate(d) * own[n] for n, d in delays.items() if n in own}
            made.append({**made[index], **{n: made[index][n] + move for n, move in moves.items()}})
            self.velocity = {**self.velocity, **{n: self.followed(n, move, delays[n]) for n, move in moves.items()}}
            total = combined((1, total), (1, own)) if total else own
            losses += loss
        self.steps += 1
        return PipelinedStep(loss=losses, gradients=total, after=made[-1])

    def velocity_at_start(self, here: Tensors) -> Tensors:
        """Return the velocity at the start of a step."""
        return self.velocity or {name: 0 * x for name, x in here.items()}

    def passed_back(self, ahead: Tensors, newest: Tensors, index: int, delays: dict[str, int]) -> Tensors:
        """v, in micro-batch `index`; `ahead`: u."""
        return {n: x - self.discrepancy(index, delays[n]) * self.velocity[n] for n, x in newest.items()}

    def discrepancy(self, index: int, delay: int) -> int:
        """d_sb."""
        return min(index, delay)

    def rate(self, delay: int) -> float:
        """r_s."""
        return float(self.workload.optimizer.learning_rate / delay ** self.power())

    def power(self) -> float:
        return rate_power(self.workload, self.steps)

    def followed(self, name: str, move: NDArray[np.floating], delay: int) -> NDArray[np.floating]:
        """m, after an update by `move`."""
        kept = self.decay(delay)
        after: NDArray[np.floating] = kept * self.velocity[name] + (1 - kept) * move
        return after

    def decay(self, delay: int) -> float:
        """D_s."""
        return float(self.discrepancy_decay ** (1 / delay))


class PipeMareTransition(Synchronous):
    """A step of the gradients of all its micro-batches, each stage by its rate; `rule` is of plain SGD."""

    def __init__(self, rule: UpdateRule, workload: Workload, num_stages: int) -> None:
        super().__init__(rule)
        self.workload, self.num_stages, self.steps = workload, num_stages, 0

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        stages = self.workload.transformer.stages_of(self.num_stages, parameters[0])
        power = rate_power(self.workload, self.steps)
        factors = {name: delay(self.num_stages, stage) ** -power for name, stage in stages.items()}
        self.steps += 1
        return super().transition(parameters, [{n: factors[n] * g for n, g in own.items()} for own in gradients])
