"""Training loops as Accelerate's documentation writes them, judged as they are.

`accelerate-loop` follows "Gradient accumulation on training samples of variable size" of Accelerate's gradient
accumulation guide: labels are counted over the whole optimizer step and all processes. `accelerate-loop-recommended`
follows `examples/by_feature/gradient_accumulation.py`: `accumulate`, the model's own mean loss, everything prepared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from meshmark.adapter.capabilities import Capabilities, Feature, Requirement
from meshmark.adapter.contract import Track
from meshmark.adapter.data_parallel import initial_model
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, Dealing, GlobalRows, Loop, LoopEngine, collate
from meshmark.adapters.accelerate import REQUIREMENT
from meshmark.adapters.accelerate.prepare import backend_arguments, choose_device, whole_batches
from meshmark.adapters.ddp import DDPRecommended
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, build_schedule, loss_share
from meshmark.spec.case import Case
from meshmark.spec.model_spec import Family
from meshmark.spec.workload import Loss
from meshmark.theory.flow import Flow, Purpose, TrafficException


class Progress:
    """Number of optimizer steps done. Accelerate saves it with the rest (`register_for_checkpointing`)."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class AccelerateLoop(Loop):
    """Counts labels over the optimizer step and all processes, and steps its own schedule."""

    prepares_schedule: ClassVar = False

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context, Dealing.MICRO_BATCHES)
        self._folder: Path | None = None

    def run(self, checkpoint: Path | None) -> None:
        choose_device(self.context)
        from accelerate import Accelerator

        spec, count = self.case.workload.optimizer, self.case.layout.num_micro_batches
        self.accelerator = Accelerator(
            cpu=self.context.device.type == "cpu",
            gradient_accumulation_steps=count,
            kwargs_handlers=[backend_arguments(self.context)],
            **self.arguments(),
        )
        model: Any = initial_model(self.case, self.context.device)
        optimizer: Any = build_optimizer(spec, model.named_parameters())
        self.schedule: Any = build_schedule(spec, optimizer)
        loader: Any = self.loader()
        model, optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        if self.schedule and self.prepares_schedule:
            self.schedule = self.accelerator.prepare(self.schedule)
        elif self.schedule:
            self.accelerator.register_for_checkpointing(self.schedule)
        if checkpoint:
            self.accelerator.load_state(str(checkpoint))
            loader = self.accelerator.skip_first_batches(loader, self.progress.step * count)
        self.ready(model, optimizer.optimizer)
        self.train(model, optimizer, iter(loader))

    def arguments(self) -> dict[str, Any]:
        """Return the further arguments that a variant gives the `Accelerator`."""
        return {}

    def loader(self) -> DataLoader[Batch]:
        """Return the loader that Accelerate prepares."""
        return DataLoader(self.rows, batch_size=self.rows_per_micro_batch, collate_fn=collate)

    def train(self, model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:  # noqa: ANN401
        accelerator, count = self.accelerator, self.case.layout.num_micro_batches
        while True:
            samples = [next(batches) for _ in range(count)]
            num_items = accelerator.gather(sum(batch.weights.sum() for batch in samples)).sum()
            total = torch.zeros((), device=accelerator.device)
            for index, batch in enumerate(samples):
                with contextlib.nullcontext() if index == count - 1 else model.no_sync():
                    loss = self.mean(model, batch) * batch.weights.sum() / num_items
                    accelerator.backward(loss * count * accelerator.num_processes)
                    total += loss.detach()
            self.gradients_complete(total)
            self.step(model, optimizer)

    def mean(self, model: Any, batch: Batch) -> Tensor:  # noqa: ANN401
        """Return the mean over the micro-batch's own targets, as a model that computes its own loss does."""
        share = loss_share(model(batch.inputs), batch, self.case.workload.loss)
        return share * batch.total_weight / batch.weights.sum()

    def step(self, model: Any, optimizer: Any) -> None:  # noqa: ANN401
        """Clip, update and save, once gradients are complete."""
        clip_norm = self.case.workload.optimizer.clip_norm
        norm = None if clip_norm is None else self.accelerator.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if self.schedule:
            self.schedule.step()
        optimizer.zero_grad()
        self.progress.step += 1
        self.step_done(norm)
        if self._folder:
            self.accelerator.save_state(str(self._folder))
            self._folder = None
            self.saved()

    def save_to(self, folder: Path) -> None:
        self._folder = folder


class SplitLoop(AccelerateLoop):
    """`split_batches`: the loader's batch is that of all processes, and a prepared schedule steps once a step."""

    prepares_schedule: ClassVar = True

    def arguments(self) -> dict[str, Any]:
        return {"dataloader_config": whole_batches()}

    def loader(self) -> DataLoader[Batch]:
        rows = self.rows_per_micro_batch * self.case.layout.dp
        return DataLoader(self.rows, batch_size=rows, collate_fn=collate)


class ShuffledRows(Dataset[Batch]):
    """Rows at the places where PyTorch's `RandomSampler` looks for them, given a seed: read so, they are in order."""

    def __init__(self, rows: GlobalRows, seed: int) -> None:
        self._rows = rows
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(seed))
        place = torch.tensor(list(sampler))
        self._row = torch.empty_like(place).scatter_(0, place, torch.arange(len(place))).tolist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        return self._rows[self._row[index]]


class ShuffledLoop(AccelerateLoop):
    """`use_seedable_sampler`: all processes shuffle alike, by `data_seed`. Its prepared schedule steps when it is asked
    to (`step_scheduler_with_optimizer=False`)."""

    prepares_schedule: ClassVar = True
    seed: ClassVar = 17

    def arguments(self) -> dict[str, Any]:
        from accelerate import DataLoaderConfiguration

        shuffled = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=self.seed)
        return {"dataloader_config": shuffled, "step_scheduler_with_optimizer": False}

    def loader(self) -> DataLoader[Batch]:
        rows = ShuffledRows(self.rows, self.seed)
        return DataLoader(rows, batch_size=self.rows_per_micro_batch, collate_fn=collate, shuffle=True)


class AccelerateExampleLoop(AccelerateLoop):
    """`accumulate` around every micro-batch, its own mean loss, and a prepared schedule."""

    prepares_schedule: ClassVar = True

    def train(self, model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:  # noqa: ANN401
        accelerator, layout = self.accelerator, self.case.layout
        total = torch.zeros((), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(model):
                loss = self.mean(model, batch)
                accelerator.backward(loss)
                total += loss.detach() / layout.num_micro_batches
                if accelerator.sync_gradients:
                    self.gradients_complete(total / layout.dp)
                    self.step(model, optimizer)
                    total = torch.zeros((), device=accelerator.device)
                else:
                    optimizer.step()  # does nothing between, as the example relies on
                    optimizer.zero_grad()


class AccelerateScript(DDPRecommended):
    """A loop that counts labels over the whole step, as Accelerate's guide has it for samples of unequal length."""

    track: ClassVar = Track.THEORY
    requires: ClassVar[tuple[Requirement, ...]] = (REQUIREMENT, GREENLET)
    preload: ClassVar[tuple[str, ...]] = ("deepspeed",)
    """Accelerate imports it, where it is installed, to see whether a model is DeepSpeed's."""
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        lacks={**LOOP_LACKS, Feature.UNUSED: "DDP is not told of parameters that a step does not use"},
    )
    loop: ClassVar[type[AccelerateLoop]] = AccelerateLoop
    counts_labels: ClassVar[bool] = True
    """Whether processes bring their numbers of labels together."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.loss is Loss.OWN:
            return f"{case.adapter} does not support a user's own loss, of which it knows no mean"
        return super().supports(case, device, backend)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        found = super().traffic_exceptions(case, rank)
        return (*found, _counts_labels(case)) if cls.counts_labels and case.layout.dp > 1 else found

    def build(self, case: Case, context: RankContext) -> Engine:
        return LoopEngine(case, context, self.loop(case, context))


class AccelerateScriptRecommended(AccelerateScript):
    """The loop of Accelerate's example of gradient accumulation, with the model's own mean loss."""

    track: ClassVar = Track.AUTHORS
    loop: ClassVar[type[AccelerateLoop]] = AccelerateExampleLoop
    counts_labels: ClassVar[bool] = False


class AccelerateSplit(AccelerateScript):
    """The guide's loop, whose loader splits batches of all processes."""

    loop: ClassVar[type[AccelerateLoop]] = SplitLoop


class AccelerateShuffled(AccelerateScript):
    """The guide's loop, whose loader shuffles by a seed."""

    loop: ClassVar[type[AccelerateLoop]] = ShuffledLoop


def _counts_labels(case: Case) -> TrafficException:
    """Return what `gather` sends: one number of labels a process, in the dtype of the weights."""
    count = Flow(
        kind="all_gather",
        axes="dp",
        ranks=tuple(range(case.layout.dp)),
        purpose=Purpose.LOSS,
        num_bytes=case.precision.wide.itemsize * case.layout.dp,
        fewest=1,
        most=1,
    )
    return TrafficException(sends=(count,), reason="labels are counted over all processes, once a step")
