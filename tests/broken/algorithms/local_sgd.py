"""Local SGD that averages at another time, otherwise, or something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.judge.faults import Fault
from meshmark.spec.layout import Layout
from tests.broken.engine import Broken, average
from tests.broken.mutant import GPT, of_algorithm, on


class Averaging(Broken):
    """Puts `average` in the place of what PyTorch's averager does after the local step; `due` is when it would."""

    module: Any

    def prepare(self) -> None:
        averager = self.optimizer.averager
        honest = averager.average_parameters

        def average_parameters(params: object) -> None:
            due = self.case.workload.algorithm.averages_after(averager.step)
            if self.averages(due):
                averager.step = self.case.workload.algorithm.warmup_steps  # when it always averages
                honest(params)
            self.local_steps += 1
            averager.step = self.local_steps

        self.local_steps = 0
        averager.average_parameters = average_parameters

    def averages(self, due: bool) -> bool:
        return due


class AveragesLate(Averaging):
    """One step late."""

    was_due = False

    def averages(self, due: bool) -> bool:
        self.was_due, before = due, self.was_due
        return before


class NeverAverages(Averaging):
    def averages(self, due: bool) -> bool:
        return False


class AlwaysAverages(Averaging):
    def averages(self, due: bool) -> bool:
        return True


class AveragesGradients(Averaging):
    """In the place of parameters, where these were to be averaged."""

    def averages(self, due: bool) -> bool:
        return False

    def after_backward(self) -> None:
        if self.case.workload.algorithm.averages_after(self.steps):
            average(gradient for _, gradient in self.grads())


class AveragesGradientsUnseen(AveragesGradients):
    """When the update begins: the gradients that it tells are its own."""

    def after_backward(self) -> None:
        pass

    def update(self) -> Tensor | None:
        with torch.no_grad():
            if self.case.workload.algorithm.averages_after(self.steps - 1):
                average([gradient for _, gradient in self.grads()])
        return super().update()


class ReducesAlways(Broken):
    """The hook goes on reducing gradients after the warm-up."""

    def after_backward(self) -> None:
        average([gradient for _, gradient in self.grads()])


class WarmsUpAlone(Broken):
    """The hook reduces nothing in the warm-up either."""

    hook_state: Any

    def prepare(self) -> None:
        self.hook_state.start_localSGD_iter = 0


class WarmsUpTooLong(WarmsUpAlone):
    """By a step."""

    def prepare(self) -> None:
        self.hook_state.start_localSGD_iter += 1


class StartsElsewhere(Broken):
    """The last replica alone."""

    def prepare(self) -> None:
        if self.context.rank == self.context.world_size - 1:
            self.put([tensor * 1.001 for tensor in self.locals()])


class AveragesInPairs(Broken):
    """Over a subgroup, as of one node, where all were meant."""

    def prepare(self) -> None:
        self.optimizer.averager.process_group, _ = dist.new_subgroups(group_size=2)


class SumsParameters(Broken):
    """The sum over replicas in the place of the mean."""

    def update(self) -> Tensor | None:
        norm = super().update()
        if self.case.workload.algorithm.averages_after(self.steps - 1):
            self.put([tensor * self.context.world_size for tensor in self.locals()])
        return norm


_WARMED_UP = replace(GPT, name="gpt-mini-local-sgd2w2", algorithm=LocalSGD(period=2, warmup_steps=2))
_NAMED = {
    AveragesLate: "is not taken, but 1 late, after step 1",
    NeverAverages: "is not taken, nor after any later step",
    AlwaysAverages: "parameters are averaged after this step, where no averaging is due",
    AveragesGradients: "gradients are reduced in a step that each replica takes alone",
    AveragesGradientsUnseen: "the norm that replica 0 tells is that of the mean of all replicas' gradients",
    ReducesAlways: "gradients are reduced in a step that each replica takes alone",
    SumsParameters: "the sum over replicas, not their mean",
}
_IN_PAIRS = {AveragesInPairs: "averaged over groups of replicas, .*, not over all"}
MUTANTS = [
    *of_algorithm("post-local-sgd", "gpt-mini-local-sgd2", _NAMED),
    *of_algorithm("post-local-sgd", "gpt-mini-local-sgd2", _IN_PAIRS, layout=Layout(dp=4, num_micro_batches=2)),
    *on("post-local-sgd", WarmsUpAlone, Fault.NOT_REDUCED, workload=_WARMED_UP),
    *on("post-local-sgd", WarmsUpTooLong, Fault.ALGORITHM, workload=_WARMED_UP),
    *on("post-local-sgd", StartsElsewhere, Fault.START),
]
