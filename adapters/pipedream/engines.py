"""PipeDream: a pipeline whose weights are updated after every micro-batch, by gradients at the version that it used.

A variant uses the same version at all stages: the one that the first stage had.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapter.engine import RankContext
from meshmark.adapters.pipeline import PipelineEngine
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype

Weights = dict[str, Tensor]
"""Weights of a stage, by their names in the module that is run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
    """A micro-batch between its forward and its backward pass."""

    taken: Tensor
    """Activations received from the stage before."""
    stashed: Weights
    """The weights that its forward pass found, for its backward pass."""
    made: Tensor


class PipeDreamEngine(PipelineEngine):
    """`backward` makes an update a micro-batch, and `update` lets go of the versions before the last."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context)
        self.versions: list[Weights] = []
        """Versions by the number of updates since the step began. Empty if no micro-batch will use it."""
        self.flying: dict[int, InFlight] = {}
        """Micro-batches in flight, by number."""
        self.sent: list[dist.Work] = []
        self.losses: list[Tensor] = []

    def backward(self, batch: Batch) -> Tensor:
        layout, whole = self.case.layout, batch.to(self.context.device)
        self.total_weight = whole.total_weight
        self.versions, self.sent, self.losses = [self.first_version()], [], []
        count = layout.num_micro_batches
        parts, ahead = list(whole.micro_batches(count)), min(self.most_in_flight, count)
        for index in range(count + ahead):
            if index < count:
                self.pass_forward(index, parts[index])
            if index >= ahead:
                self.pass_back(index - ahead)
        for work in self.sent:
            work.wait()
        loss = torch.stack(self.losses).sum() if self.last else torch.zeros(())
        self.sent, self.losses = [], []  # works keep what they sent
        return loss

    @property
    def part(self) -> torch.nn.Module:
        found: torch.nn.Module = self.stages[0].submod
        return found

    @property
    def stages_after(self) -> int:
        return self.case.layout.pp - 1 - self.stands.pp

    @property
    def most_in_flight(self) -> int:
        """Forward passes before the first backward pass."""
        return self.stages_after

    def first_version(self) -> Weights:
        return dict(self.part.named_parameters())

    def version_of(self, micro_batch: int) -> int:
        """Return the version of the weights that a forward pass uses: the newest one here."""
        return len(self.versions) - 1

    def pass_forward(self, micro_batch: int, batch: Batch) -> None:
        taken = batch.inputs if self.first else self.received(batch).requires_grad_()
        stashed = self.versions[self.version_of(micro_batch)]
        made: Tensor = torch.func.functional_call(self.part, stashed, (taken,))
        if self.last:
            made = self._loss(made, batch.targets)
            self.losses.append(made.detach())
        else:
            self.send(made.detach(), self.context.rank + 1)
        self.flying[micro_batch] = InFlight(taken=taken, stashed=stashed, made=made)

    def pass_back(self, micro_batch: int) -> None:
        at = self.flying.pop(micro_batch)
        of_made = None if self.last else torch.empty_like(at.made)
        if of_made is not None:
            dist.recv(of_made, self.context.rank + 1)
        trained = {name: w for name, w in at.stashed.items() if w.requires_grad}
        wanted = [*trained.values(), *([] if self.first else [at.taken])]
        found = torch.autograd.grad(at.made, wanted, of_made)
        if not self.first:
            self.send(found[-1], self.context.rank - 1)
        self.step_on(dict(zip(trained, found[: len(trained)], strict=True)))
        self.forget(micro_batch + 1)

    @torch.no_grad()
    def step_on(self, gradients: Weights) -> None:
        """Append the next version of the weights, one step of `gradients` after the newest."""
        rate, newest = self.case.workload.optimizer.learning_rate, self.versions[-1]
        moved = {n: newest[n].sub(g, alpha=rate).requires_grad_() for n, g in gradients.items()}
        self.versions.append({**newest, **moved})
        self.keep(gradients)

    def keep(self, gradients: Weights) -> None:
        """Add gradients to the sum that makes up the step."""
        parameters = dict(self.part.named_parameters())
        for name, gradient in gradients.items():
            before = parameters[name].grad
            parameters[name].grad = gradient if before is None else before.add_(gradient)

    def forget(self, done: int) -> None:
        """Free the versions that no forward pass after `done` backward passes will use."""
        oldest = min(self.version_of(done + self.stages_after), len(self.versions) - 1)
        for index in range(oldest):
            self.versions[index] = {}

    def received(self, batch: Batch) -> Tensor:
        model = self.case.workload.transformer
        dtype = torch.float64 if self.case.precision.master is Dtype.FP64 else torch.float32
        stream = torch.empty(len(batch), model.seq_len, model.hidden, dtype=dtype, device=self.context.device)
        dist.recv(stream, self.context.rank - 1)
        return stream

    def send(self, tensor: Tensor, rank: int) -> None:
        work = dist.isend(tensor.contiguous(), rank)
        assert work is not None
        self.sent.append(work)

    @torch.no_grad()
    def update(self) -> Tensor | None:
        newest = self.versions[-1]
        for name, parameter in self.part.named_parameters():
            parameter.copy_(newest[name])
        self.versions = []
        self.optimizer.zero_grad(set_to_none=True)
        return None


class VerticalEngine(PipeDreamEngine):
    """PipeDream with vertical sync: every stage uses the version that the first stage used."""

    def version_of(self, micro_batch: int) -> int:
        return max(0, micro_batch - (self.case.layout.pp - 1))
