"""DeepSpeed reads the data: its `deepspeed_io` in the loop of its Getting Started guide, and its curriculum learning.

The loop owns accumulation as the guide does: every micro-batch is a `backward` and a `step`, and the engine counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from meshmark.adapter.contract import Feature, Requirement
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, Dealing, GlobalRows, Loop, LoopEngine, collate
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.config import prepare
from meshmark.adapters.deepspeed.engine import TAG, DeepSpeedEngine
from meshmark.errors import AdapterError
from meshmark.models.transformer import TEXT_FAMILIES
from meshmark.reference.data import IGNORED, Batch
from meshmark.reference.objective import build_optimizer, build_schedule, loss_share
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss
from meshmark.theory.traffic import Flow, Purpose, TrafficException

_SEED = 17
_STEPS = 2_048
"""Optimizer steps that a curriculum has rows for."""
_CLUSTERS = "clusters"
_BEYOND = 8
"""Tokens behind each row that the curriculum cuts off."""


class DeepSpeedLoopEngine(LoopEngine, DeepSpeedEngine):
    """A loop that has made a `deepspeed.DeepSpeedEngine` of the model."""


class PlacedRows(Dataset[Batch]):
    """Rows at the places where a sampler looks for them: read in its order, they are in the workload's."""

    def __init__(self, rows: GlobalRows, places: list[int]) -> None:
        """`places`: which place is read first, which second, and so on."""
        self.rows = rows
        self._row = np.argsort(places)

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, place: int) -> Batch:
        return self.rows[int(self._row[place])]


class DeepSpeedLoop(Loop):
    """Rows are read by `deepspeed_io`, whose sampler shuffles by PyTorch's seed 0."""

    dealing: ClassVar = Dealing.ROWS

    def __init__(self, case: Case, context: RankContext, config: dict[str, Any]) -> None:
        super().__init__(case, context, self.dealing)
        self.config = config
        self._folder: Path | None = None
        self.engine: Any

    def inner(self) -> nn.Module:
        inner: nn.Module = self.engine.module
        return inner

    def run(self, checkpoint: Path | None) -> None:
        prepare(self.context)
        import deepspeed

        spec, count = self.case.workload.optimizer, self.case.layout.num_micro_batches
        model = initial_model(self.case, self.context.device)
        optimizer = build_optimizer(spec, model.named_parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=build_schedule(spec, optimizer),
            config=self.config,
            collate_fn=collate,
            **self.arguments(),
        )
        steps, loader = 0, self.loader()
        if checkpoint:
            self.bring_files(checkpoint)
            path, state = self.engine.load_checkpoint(str(checkpoint), tag=TAG)
            if path is None:
                raise AdapterError(f"rank {self.context.rank}: DeepSpeed found no checkpoint in {checkpoint}")
            steps = state["steps"]
        batches = self.behind(iter(loader), steps * count)
        self.ready(self.engine, self.engine.optimizer)
        while True:
            total = torch.zeros((), device=self.context.device)
            for index in range(count):
                batch = next(batches).to(self.context.device)
                share = loss_share(self.engine(batch.inputs), batch, self.case.workload.loss)
                # The engine divides by micro-batches, and averages over ranks, what are shares of the global mean.
                self.engine.backward(share * count * self.case.layout.dp)
                total += share.detach()
                if index == count - 1:
                    self.gradients_complete(total)
                self.engine.step()
            steps += 1
            self.step_done(self.engine.get_global_grad_norm())
            if self._folder:
                self.engine.save_checkpoint(str(self._folder), tag=TAG, client_state={"steps": steps})
                self.keep_files(self._folder)
                self._folder = None
                self.saved()

    def arguments(self) -> dict[str, Any]:
        """Return the further arguments of `deepspeed.initialize`."""
        return {}

    def loader(self) -> Any:  # noqa: ANN401
        places = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(0)).tolist()
        return self.engine.deepspeed_io(PlacedRows(self.rows, places), num_local_io_workers=0)

    def behind(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the batches behind those that were trained on before a checkpoint."""
        return itertools.islice(batches, count, None)

    def save_to(self, folder: Path) -> None:
        self._folder = folder

    def keep_files(self, folder: Path) -> None:
        """Put beside a checkpoint what is not in it, as a variant may."""

    def bring_files(self, folder: Path) -> None:
        """Put back what `keep_files` has kept."""


class LongRows(PlacedRows):
    """Every row has tokens behind its end, which are to be cut off."""

    def __getitem__(self, place: int) -> Batch:
        row = super().__getitem__(place)
        return dataclasses.replace(
            row,
            inputs=F.pad(row.inputs, (0, _BEYOND)),
            targets=F.pad(row.targets, (0, _BEYOND), value=IGNORED),
            weights=F.pad(row.weights, (0, _BEYOND)),
        )


class CurriculumLoop(DeepSpeedLoop):
    """`data_efficiency`: the first rank draws what all ranks read, a schedule of the user's says how long sequences
    are, and a function of the user's cuts them. The checkpoint has the sampler's state."""

    dealing: ClassVar = Dealing.MICRO_BATCHES

    def arguments(self) -> dict[str, Any]:
        batch, generator = self.case.workload.global_batch, np.random.default_rng(_SEED)
        shuffled, places = np.arange(_STEPS * batch), list[int]()
        generator.shuffle(shuffled)
        for step in range(_STEPS):  # as DeepSpeedDataSampler draws them from a single cluster
            generator.choice(1, batch, replace=True, p=[1.0])
            drawn = list(shuffled[step * batch : (step + 1) * batch])
            generator.shuffle(drawn)
            places += drawn
        return {"training_data": LongRows(self.rows, places)}

    def loader(self) -> Any:  # noqa: ANN401
        self.engine.set_custom_curriculum_learning_schedule({"length": self.length})
        self.engine.set_data_post_process_func(_cut)
        return self.engine.training_dataloader

    def length(self, step: int) -> int:
        """Return the number of tokens of a sequence in a step: the workload's, from the first step on."""
        return self.case.workload.model.seq_len

    def behind(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """The sampler goes on by itself."""
        return batches

    def keep_files(self, folder: Path) -> None:
        """The sampler's state names files of the order of rows, which are the user's to keep."""
        if self.context.rank == 0:
            shutil.copytree(self.context.scratch / _CLUSTERS, folder / _CLUSTERS)

    def bring_files(self, folder: Path) -> None:
        if self.context.rank == 0:
            shutil.copytree(folder / _CLUSTERS, self.context.scratch / _CLUSTERS, dirs_exist_ok=True)


def _cut(batch: Batch, state: dict[str, Any]) -> Batch:
    length = state["current_difficulties"]["length"]
    return dataclasses.replace(
        batch,
        inputs=batch.inputs[:, :length].contiguous(),
        targets=batch.targets[:, :length].contiguous(),
        weights=batch.weights[:, :length].contiguous(),
    )


class DeepSpeedLoader(DeepSpeed):
    """Its Getting Started guide's loop over `deepspeed_io`, which leaves out what is over (`dataloader_drop_last`)."""

    loop: ClassVar[type[DeepSpeedLoop]] = DeepSpeedLoop
    requires: ClassVar[tuple[Requirement, ...]] = (*DeepSpeed.requires, GREENLET)
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            **LOOP_LACKS,
            Precision.BF16: "not tried",
            Precision.FP16: "not tried",
            Feature.RESHARD: "not tried",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.loss is Loss.OWN:
            return f"{case.adapter} does not support a user's own loss"
        return super().supports(case, device, backend)

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().config(case, context), "dataloader_drop_last": True}

    def build(self, case: Case, context: RankContext) -> Engine:
        return DeepSpeedLoopEngine(case, context, self.loop(case, context, self.config(case, context)))


class DeepSpeedCurriculum(DeepSpeedLoader):
    """`data_efficiency` with a curriculum whose schedule is `custom`."""

    loop: ClassVar = CurriculumLoop
    capabilities: ClassVar = dataclasses.replace(DeepSpeedLoader.capabilities, families=TEXT_FAMILIES)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        drawn = Flow(
            kind="broadcast",
            axes="dp",
            ranks=tuple(range(case.layout.dp)),
            purpose=Purpose.LOSS,
            num_bytes=8 * case.workload.global_batch,
            fewest=1,
            most=1,
        )
        told = TrafficException(sends=(drawn,), reason="the first rank tells which rows a global batch has")
        return (*super().traffic_exceptions(case, rank), *([told] if case.layout.dp > 1 else []))

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        length = {
            "difficulty_type": "value",
            "clustering_type": "single_cluster",
            "min_difficulty": 1,
            "max_difficulty": case.workload.model.seq_len + _BEYOND,
            "schedule_type": "custom",
        }
        folder = str(context.scratch / _CLUSTERS)
        learning = {"enabled": True, "data_cluster_path": folder, "curriculum_metrics": {"length": length}}
        sampling = {"enabled": True, "num_epochs": 1, "curriculum_learning": learning}
        efficiency = {"enabled": True, "seed": _SEED, "data_sampling": sampling}
        return {**super().config(case, context), "data_efficiency": efficiency}
