"""Judge values that cross ranks, and schedules and samplers that single steps do not show."""

from __future__ import annotations

import torch

from meshmark.check.judge.gradients import GradientJudge
from meshmark.check.judge.tensors import is_near
from meshmark.check.objective import SAME
from meshmark.check.run import Moment
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault, named_factor


def judge_crossing(gradients: GradientJudge, moment: Moment, verdict: Verdict) -> None:
    """Note what the script does that gradients and updates of single steps do not show."""
    names = [step.gathered for step in moment.ranks if step.gathered]
    if names:
        verdict.add(
            Level.NOTE, "values cross ranks",
            f"{names[0]} is called between forward and backward, and no gradient passes it: what other ranks' rows "
            "add to the loss has no gradient on any rank, and the objective is that of each rank's own loss "
            "(torch.distributed.nn.functional has collectives that gradients pass)", moment.number,
        )  # fmt: skip
    _judge_gathers(gradients, moment, verdict)
    again = next((s.epoch_again for s in moment.ranks if s.epoch_again is not None), None)
    if again is not None:
        verdict.add(
            Level.NOTE, "the same order again",
            f"a DistributedSampler begins epoch {again} again, with the same order of rows (sampler.set_epoch "
            "missing?)", moment.number,
        )  # fmt: skip
    steps = max(step.schedule_steps for step in moment.ranks)
    if steps > 1:
        told = f"the learning-rate schedule takes {steps} steps for one of the optimizer"
        if steps == max(step.schedule_steps_by_design for step in moment.ranks):
            told += (
                ", one a process, as Accelerate's prepared schedules do: it must be made for as many times the "
                "steps, or by an Accelerator with split_batches=True"
            )
        verdict.add(Level.NOTE, "schedule steps", told, moment.number)


def _judge_gathers(gradients: GradientJudge, moment: Moment, verdict: Verdict) -> None:
    """Judge functions of the script's own that gather tensors: their gradient is the sum over the ranks' losses.

    If every rank computes the whole loss, that is a multiple of the gradient of its own.
    """
    world = len(moment.ranks)
    for gathers in zip(*(step.gathers for step in moment.ranks), strict=False):
        if len({g.result.shape for g in gathers}) > 1:
            continue
        allowed = max(SAME, 4 * torch.finfo(gathers[0].given.dtype).eps)
        whole = torch.stack([g.result.double() for g in gathers]).sum(0)
        given = torch.stack([g.given.double() for g in gathers])
        if is_near(given, whole, allowed):
            continue
        alone = torch.stack([g.result[rank].double() for rank, g in enumerate(gathers)])
        told = "an autograd function of the script's own gathers values over ranks, and its backward pass "
        told += (
            "leaves out the gradients of other ranks' losses"
            if is_near(given, alone, allowed)
            else "does not add up the gradients of the ranks' losses"
        )
        is_mean = bool(gradients.objectives) and abs(gradients.objectives[-1].total - 1) <= SAME
        if is_mean and gradients.factor != 1.0 and is_near(world * given, whole, allowed):
            verdict.add(
                Level.WRONG, Fault.SCALED,
                f"{told}: every rank computes the loss of all rows, and after the average over ranks the gradient "
                f"that passes it is {named_factor(1 / world, gradients.run.known_factors(1))} times the right one",
                moment.number,
            )  # fmt: skip
        else:
            if is_near(given, alone, allowed):
                told += " (each rank's loss takes other ranks' values for constants)"
            verdict.add(Level.NOTE, "values cross ranks", told, moment.number)
