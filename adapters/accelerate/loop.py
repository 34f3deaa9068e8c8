"""Training loops as Accelerate's documentation writes them, judged as they are.

`accelerate-loop` follows "Gradient accumulation on training samples of variable size" of Accelerate's gradient
accumulation guide: labels are counted over the whole optimizer step and all processes. `accelerate-loop-recommended`
follows `examples/by_feature/gradient_accumulation.py`: `accumulate`, the model's own mean loss, everything prepared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from meshmark.adapter.contract import Capabilities, Feature, Requirement, Track
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, Dealing, GlobalRows, Loop, LoopEngine, collate
from meshmark.adapters.accelerate import REQUIREMENT, UnderAccelerate
from meshmark.adapters.accelerate.prepare import (
    TakesSeveral,
    backend_arguments,
    choose_device,
    name_as_on_gpu,
    runs_on_cpus,
    whole_batches,
)
from meshmark.models.transformer import Family
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, build_schedule, loss_share
from meshmark.spec.case import Case
from meshmark.spec.workload import Loss
from meshmark.theory.backward_pass import RNG_STATE_BYTES
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.traffic import Flow, OneTimeTraffic, Purpose, TrafficException


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
    saves_after_step: ClassVar = True
    """Whether every process looks by itself whether a checkpoint was asked for."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context, Dealing.MICRO_BATCHES)
        self._folder: Path | None = None

    def run(self, checkpoint: Path | None) -> None:
        choose_device(self.context)
        from accelerate import Accelerator

        spec, count = self.case.workload.optimizer, self.case.layout.num_micro_batches
        if self.context.world_size == 1:
            name_as_on_gpu(self.context)
        arguments = {"cpu": runs_on_cpus(self.context)} | self.arguments()
        if "gradient_accumulation_plugin" not in arguments:
            arguments["gradient_accumulation_steps"] = count
        self.accelerator = Accelerator(kwargs_handlers=[backend_arguments(self.context)], **arguments)
        model: Any = initial_model(self.case, self.context.device)
        optimizer: Any = build_optimizer(spec, model.named_parameters())
        self.schedule: Any = build_schedule(spec, optimizer)
        loader: Any = self.loader()
        model, optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        self.prepared = loader
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
            num_items = self.gathered(sum(batch.weights.sum() for batch in samples)).sum()
            total = torch.zeros((), device=accelerator.device)
            for index, batch in enumerate(samples):
                puts_off = index < count - 1 and accelerator.num_processes > 1
                with model.no_sync() if puts_off else contextlib.nullcontext():
                    loss = self.mean(model, batch) * batch.weights.sum() / num_items
                    accelerator.backward(loss * count * accelerator.num_processes)
                    total += loss.detach()
            self.gradients_complete(total)
            self.step(model, optimizer)

    def gathered(self, value: Any) -> Tensor:  # noqa: ANN401
        """Return a number of every process."""
        found: Tensor = self.accelerator.gather(value)
        return found

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
        if self._folder and self.saves_after_step:
            self.save()

    def save_to(self, folder: Path) -> None:
        self._folder = folder

    def save(self) -> None:
        self.accelerator.save_state(str(self._folder))
        self._folder = None
        self.saved()


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


class SynchronizedLoop(AccelerateLoop):
    """Without a seedable sampler each process shuffles by a generator of its own, which Accelerate sets to the first
    process's (`rng_types`)."""

    seed: ClassVar = 17

    def arguments(self) -> dict[str, Any]:
        return {"rng_types": ["generator"]}

    def loader(self) -> DataLoader[Batch]:
        rows, own = ShuffledRows(self.rows, self.seed), torch.Generator().manual_seed(self.seed + self.context.rank)
        return DataLoader(
            rows, batch_size=self.rows_per_micro_batch, collate_fn=collate, sampler=RandomSampler(rows, generator=own)
        )


class TriggeredLoop(AccelerateLoop):
    """No forward pass asks for a reduction: `trigger_sync_in_backward` does, before the last backward pass of a step.

    The first process asks for a checkpoint, of which others are told by `check_trigger`.
    """

    saves_after_step: ClassVar = False

    def train(self, model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:  # noqa: ANN401
        accelerator, count = self.accelerator, self.case.layout.num_micro_batches
        while True:
            if self._folder and accelerator.is_main_process:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                self.save()
            samples = [next(batches) for _ in range(count)]
            num_items = accelerator.reduce(sum(batch.weights.sum() for batch in samples))
            total = torch.zeros((), device=accelerator.device)
            for index, batch in enumerate(samples):
                with accelerator.no_sync(model), accelerator.autocast():
                    loss = self.mean(model, batch) * batch.weights.sum() / num_items
                total += loss.detach()
                last = index == count - 1
                with accelerator.trigger_sync_in_backward(model) if last else accelerator.no_sync(model):
                    accelerator.backward(loss * count * accelerator.num_processes)
            self.gradients_complete(total)
            self.step(model, optimizer)


class JoinedLoop(AccelerateLoop):
    """`join_uneven_inputs`: processes whose batches end earlier would follow the others. Accelerate heeds it with
    accelerators alone: on a CPU it is given the name of such a mode."""

    def arguments(self) -> dict[str, Any]:
        name_as_on_gpu(self.context)
        # Accelerate would otherwise name DDP's device by local rank, which is wrong where ranks share a device.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        return {"cpu": False}

    def train(self, model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:  # noqa: ANN401
        with self.accelerator.join_uneven_inputs([model], even_batches=False):
            super().train(model, optimizer, batches)

    def gathered(self, value: Any) -> Tensor:  # noqa: ANN401
        """Return a number of every process, without those of samples that fill up an epoch's last batch."""
        found: Tensor = self.accelerator.gather_for_metrics(value)
        return found


class DispatchedLoop(AccelerateLoop):
    """`dispatch_batches`: the first process alone reads batches of all processes, and sends each its rows."""

    def arguments(self) -> dict[str, Any]:
        from accelerate import DataLoaderConfiguration

        config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True, even_batches=False)
        return {"dataloader_config": config}

    def loader(self) -> DataLoader[Any]:
        rows = self.rows_per_micro_batch * self.case.layout.dp
        return DataLoader(self.rows, batch_size=rows, collate_fn=_as_mapping)

    def train(self, model: Any, optimizer: Any, batches: Iterator[Any]) -> None:  # noqa: ANN401
        super().train(model, optimizer, map(_of_mapping, batches))


def _as_mapping(rows: Sequence[Batch]) -> dict[str, Any]:
    """Return a batch as tensors whose first dimension is that of rows: what Accelerate can cut."""
    batch = collate(rows)
    total = torch.full((len(rows),), batch.total_weight, dtype=torch.float64)
    return {"inputs": batch.inputs, "targets": batch.targets, "weights": batch.weights, "total_weight": total}


def _of_mapping(found: dict[str, Any]) -> Batch:
    return Batch(**{**found, "total_weight": float(found["total_weight"][0])})


class ShortEpochs(Dataset[Batch]):
    """A part of the rows at a time: an epoch has `num_rows`, and `next_epoch` goes on where it has ended."""

    def __init__(self, rows: GlobalRows, num_rows: int) -> None:
        self._rows, self._num_rows, self._first = rows, num_rows, 0

    def next_epoch(self) -> None:
        self._first += self._num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Batch:
        return self._rows[self._first + index]


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


class EpochsLoop(AccelerateExampleLoop):
    """The example's loop over epochs that end within an optimizer step, which `sync_with_dataloader=False` carries on
    in the next. The schedule is not told of micro-batches (`adjust_scheduler=False`)."""

    def arguments(self) -> dict[str, Any]:
        from accelerate.utils import GradientAccumulationPlugin

        count = self.case.layout.num_micro_batches
        plugin = GradientAccumulationPlugin(num_steps=count, adjust_scheduler=False, sync_with_dataloader=False)
        return {"gradient_accumulation_plugin": plugin}

    def mean(self, model: Any, batch: Batch) -> Tensor:  # noqa: ANN401
        """Return the sum over the micro-batch's targets by the mean number of targets of one, of all processes."""
        layout = self.case.layout
        share = loss_share(model(batch.inputs), batch, self.case.workload.loss)
        return share * layout.num_micro_batches * layout.dp

    def loader(self) -> DataLoader[Batch]:
        layout = self.case.layout
        rows = self.rows_per_micro_batch * layout.dp * (layout.num_micro_batches + 1)
        self.epochs = ShortEpochs(self.rows, rows)
        return DataLoader(self.epochs, batch_size=self.rows_per_micro_batch, collate_fn=collate)

    def train(self, model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:  # noqa: ANN401
        super().train(model, optimizer, self.all_epochs())

    def all_epochs(self) -> Iterator[Batch]:
        while True:
            yield from self.prepared
            self.epochs.next_epoch()


class AccelerateScript(UnderAccelerate):
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
        return (*found, _counts_labels(case)) if cls.counts_labels else found

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


class AccelerateSynchronized(AccelerateScript):
    """The guide's loop, whose processes shuffle by a generator that Accelerate synchronizes."""

    loop: ClassVar[type[AccelerateLoop]] = SynchronizedLoop

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        told = OneTimeTraffic(
            kind="broadcast",
            steps=(0,),
            most_bytes=RNG_STATE_BYTES,
            most_calls=1,
            reason="the first process tells others the state of its generator, once an epoch",
        )
        return (*super().one_time_traffic(case, rank), told)


class AccelerateTriggered(TakesSeveral, AccelerateScript):
    """The guide's loop, which asks for a reduction in the last backward pass of a step."""

    loop: ClassVar[type[AccelerateLoop]] = TriggeredLoop
    counts_labels: ClassVar[bool] = False

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Labels are counted by `reduce`, and a flag of 8 bytes is summed by `check_trigger`."""

        def summed(num_bytes: int) -> Flow:
            return Flow(
                kind="all_reduce",
                axes="dp",
                ranks=tuple(range(case.layout.dp)),
                purpose=Purpose.LOSS,
                num_bytes=num_bytes,
                fewest=1,
                most=1,
            )

        sends = (summed(case.precision.wide.itemsize), summed(8))
        reason = "labels are counted over all processes, and whether one asks for a checkpoint, once a step"
        return (*super().traffic_exceptions(case, rank), TrafficException(sends=sends, reason=reason))


class AccelerateJoined(TakesSeveral, AccelerateScript):
    """The guide's loop, whose processes may end at different times."""

    loop: ClassVar[type[AccelerateLoop]] = JoinedLoop

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Before each forward pass ranks count those that still train, and those that are to reduce."""
        found, calls = super().traffic_exceptions(case, rank), 2 * case.layout.num_micro_batches
        counted = Flow(
            kind="all_reduce",
            axes="dp",
            ranks=tuple(range(case.layout.dp)),
            purpose=Purpose.LOSS,
            num_bytes=4 * calls,
            fewest=calls,
            most=calls,
        )
        reason = "ranks tell each other whether they still train, and whether they reduce"
        return (*found, TrafficException(sends=(counted,), reason=reason))


class AccelerateDispatched(AccelerateScript):
    """The guide's loop, whose first process reads for all."""

    loop: ClassVar[type[AccelerateLoop]] = DispatchedLoop

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """Return False: the first process pickles what it tells others of each batch, so its size is not planned."""
        return False

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        ahead = OneTimeTraffic(
            kind="broadcast",
            steps=(0,),
            most_bytes=2048,
            most_calls=6,
            reason="the first process tells others what batches look like, and reads one ahead",
        )
        return (*super().one_time_traffic(case, rank), ahead)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Other processes receive whole batches, of which they take a part: of this step and one ahead, by row inputs
        and targets as 8 bytes a token and weights as 4. The first process's are the suite's own."""
        found, layout, workload = super().extra_memory(case, rank), case.layout, case.workload
        if rank == 0:
            return found
        rows = workload.global_batch // layout.num_micro_batches * (layout.num_micro_batches + 1)
        num_bytes = float(rows * (workload.model.seq_len * (8 + 8 + 4) + 8))
        reason = "batches of all processes are received whole, one of them ahead"
        return (*found, ExtraMemory(category="steady", num_bytes=num_bytes, reason=reason))


class AccelerateEpochs(AccelerateScriptRecommended):
    """The example's loop over short epochs."""

    track: ClassVar = Track.THEORY
    loop: ClassVar[type[AccelerateLoop]] = EpochsLoop


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
