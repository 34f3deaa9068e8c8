"""Pipelines that do not wait (PipeDream, arXiv:1806.03377; PipeDream-2BW, arXiv:2006.09503), between processes: ours,
for no kept library does it. What is sent where is 1F1B's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapter.capabilities import Capabilities, Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.holdings import Holdings
from meshmark.adapters.checkpoint import load_own, save_own
from meshmark.adapters.pipeline import Pipeline, PipelineEngine
from meshmark.reference.data import Batch
from meshmark.spec.algorithm import BY_MICRO_BATCH, STALE, AlgorithmKind
from meshmark.spec.case import Case
from meshmark.spec.layout import Schedule
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.states import Remainder, local_parameters

Weights = dict[str, Tensor]
"""Of a stage, by the names of what is run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
    """A micro-batch between its forward and its backward pass."""

    taken: Tensor
    """What came from the stage before."""
    stashed: Weights
    """The weights that its forward pass found, for its backward pass."""
    made: Tensor


class PipeDreamEngine(PipelineEngine):
    """`backward` makes an update a micro-batch, and `update` lets go of the versions before the last."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context)
        self.versions: list[Weights] = []
        """By the number of updates since the step began. Empty where no micro-batch will find it."""
        self.flying: dict[int, InFlight] = {}
        """By micro-batch."""
        self.sent: list[dist.Work] = []
        self.losses: list[Tensor] = []

    def backward(self, batch: Batch) -> Tensor:
        layout, whole = self.case.layout, batch.to(self.context.device)
        self.total_weight = whole.total_weight
        self.versions, self.sent, self.losses = [dict(self.part.named_parameters())], [], []
        count = layout.num_micro_batches
        parts, ahead = list(whole.micro_batches(count)), min(self.stages_after, count)
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

    def version_of(self, micro_batch: int) -> int:
        """Whose weights its forward pass takes: the newest that are here."""
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
        """The next version; and what the step is made of, all together."""
        rate, newest = self.case.workload.optimizer.learning_rate, self.versions[-1]
        moved = {n: newest[n].sub(g, alpha=rate).requires_grad_() for n, g in gradients.items()}
        self.versions.append({**newest, **moved})
        parameters = dict(self.part.named_parameters())
        for name, gradient in gradients.items():
            before = parameters[name].grad
            parameters[name].grad = gradient if before is None else before.add_(gradient)

    def forget(self, done: int) -> None:
        """Versions that no forward pass after `done` backward passes will take."""
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
    """At every stage the version that the first stage found."""

    def version_of(self, micro_batch: int) -> int:
        return max(0, micro_batch - (self.case.layout.pp - 1))


class TwoBufferedEngine(PipelineEngine):
    """`shadow`: the weights before those that the optimizer steps from; of them is every gradient."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context)
        self.shadow: list[Tensor] = [p.detach().clone() for p in self.model.parameters()]

    def backward(self, batch: Batch) -> Tensor:
        self.swap()
        loss = super().backward(batch)
        self.swap()
        return loss

    @torch.no_grad()
    def swap(self) -> None:
        for parameter, shadow in zip(self.model.parameters(), self.shadow, strict=True):
            now = parameter.clone()
            parameter.copy_(shadow)
            shadow.copy_(now)

    def update(self) -> Tensor | None:
        torch._foreach_copy_(self.shadow, [p.detach() for p in self.model.parameters()])
        return super().update()

    def holdings(self) -> Holdings:
        held = super().holdings()
        return dataclasses.replace(held, optimizer_states=[*held.optimizer_states, *self.shadow])

    def save(self, folder: Path) -> None:
        save_own(folder, {"shadow": self.shadow})
        super().save(folder)

    def load(self, folder: Path) -> None:
        super().load(folder)
        torch._foreach_copy_(self.shadow, load_own(folder, self.context.device)["shadow"])


ENGINES: dict[AlgorithmKind, type[PipelineEngine]] = {
    AlgorithmKind.PIPEDREAM: PipeDreamEngine,
    AlgorithmKind.PIPEDREAM_VERTICAL: VerticalEngine,
    AlgorithmKind.PIPEDREAM_2BW: TwoBufferedEngine,
}


class PipeDream(Pipeline):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"pp"}),
        schedules=frozenset({Schedule.ONE_F_ONE_B}),
        families=Pipeline.capabilities.families,
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        algorithms=STALE,
        lacks={
            **Pipeline.capabilities.lacks,
            Precision.BF16: "its gradients would be held against a twin of one set of weights",
            Feature.TIED_EMBEDDINGS: "two stages would hold two versions of one weight",
            Feature.UNUSED: "a micro-batch makes an update of every weight",
            Feature.DROPOUT: "its masks are judged at one set of weights",
            Feature.RESHARD: "older versions are saved by rank",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Of stashed versions no peak is planned."""
        own_loop = case.workload.algorithm.kind in BY_MICRO_BATCH
        return dataclasses.replace(super().recipe(case), activations_known=False, receive_buffers=not own_loop)

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[Remainder, ...]:
        if case.workload.algorithm.kind in BY_MICRO_BATCH:
            return ()
        count = local_parameters(case.workload.model, case.layout, rank)
        assert count is not None
        num_bytes = count * case.precision.master.itemsize
        return (Remainder(category="optimizer_states", num_bytes=num_bytes, reason="the weights of the step before"),)

    def build(self, case: Case, context: RankContext) -> Engine:
        return ENGINES[case.workload.algorithm.kind](case, context)
