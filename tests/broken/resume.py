"""Checkpoints that lose or mix up something, without an error. Mixins over engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.models.module import initial_value
from tests.broken.engine import ONE_NORM, Broken, copy


class SavesMomentsLater(Broken):
    """The moments are written only when the run ends: a run that is killed before has moments of zero."""

    def save(self, folder: Path) -> None:
        self.folder, self.beside = folder, folder.with_name(f"{folder.name}.beside")
        self.beside.mkdir(exist_ok=True)
        super().save(self.beside)
        kept = [moment.clone() for moment in self.moments()]
        for moment in self.moments():
            moment.zero_()
        super().save(folder)
        copy(self.moments(), kept)

    def close(self) -> None:
        dist.barrier()
        if hasattr(self, "beside") and self.context.rank == 0:
            shutil.copytree(self.beside, self.folder, dirs_exist_ok=True)
        super().close()


class ForgetsMoments(Broken):
    """Weights are loaded, the optimizer starts anew."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        for moment in self.moments():
            moment.zero_()


class ForgetsSecondMoments(Broken):
    def load(self, folder: Path) -> None:
        super().load(folder)
        for moment in self.moments("exp_avg_sq"):
            moment.zero_()


class ForgetsCount(Broken):
    """The bias correction begins at its first step again."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        for state in self.inner_optimizer().state.values():
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0


class ForgetsSchedule(Broken):
    """The warm-up begins again."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.resumed_at = self.steps

    def update(self) -> Tensor | None:
        if hasattr(self, "resumed_at"):
            spec = self.case.workload.optimizer
            for group in self.optimizer.param_groups:
                group["lr"] = spec.learning_rate * spec.rate_factor(self.steps - 1 - self.resumed_at)
        norm: Tensor | None = super().update()
        return norm


class ForgetsWeights(Broken):
    """The optimizer is loaded, the weights are those of the start."""

    def load(self, folder: Path) -> None:
        start = [p.clone() for p in self.locals()]
        super().load(folder)
        self.put(start)


class ForgetsOne(Broken):
    """One parameter's name is not the checkpoint's, and nobody is strict."""

    def load(self, folder: Path) -> None:
        start = {name: p.detach().clone() for name, p in self.named()}
        super().load(folder)
        with torch.no_grad():
            for name, p in self.named():
                if name == ONE_NORM:
                    p.copy_(start[name])


class LoadsRounded(Broken):
    """The checkpoint holds bf16 weights, and masters are made of them."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.put([p.bfloat16() for p in self.locals()])


class SavesStaleWeights(Broken):
    """Weights of the step before: an asynchronous save that started too early."""

    def update(self) -> Tensor | None:
        self.before = [p.clone() for p in self.locals()]
        norm: Tensor | None = super().update()
        return norm

    def save(self, folder: Path) -> None:
        now = [p.clone() for p in self.locals()]
        self.put(self.before)
        super().save(folder)
        self.put(now)


class SavesStaleMoments(Broken):
    def update(self) -> Tensor | None:
        before = [m.clone() for m in self.moments()]
        norm: Tensor | None = super().update()
        self.before = before or [torch.zeros_like(m) for m in self.moments()]
        return norm

    def save(self, folder: Path) -> None:
        now = [m.clone() for m in self.moments()]
        copy(self.moments(), self.before)
        super().save(folder)
        copy(self.moments(), now)


class FirstShardForAll(Broken):
    """Every rank loads the first one's part of the optimizer."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        for moment in self.moments():
            dist.broadcast(moment, 0)


class MixesShards(Broken):
    """Ranks load each other's shards of the weights."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        world = self.context.world_size
        swapped = []
        for p in self.locals():
            parts = [torch.empty_like(p) for _ in range(world)]
            dist.all_gather(parts, p.contiguous())
            swapped.append(parts[world - 1 - self.context.rank])
        self.put(swapped)


class RankForgetsMoments(Broken):
    """The second rank does not find its file."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        if self.context.rank == 1:
            for moment in self.moments():
                moment.zero_()


class ForgetsStage(Broken):
    """The states of the pipeline's second stage are not restored."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        spec, seed = self.case.workload.model, self.case.workload.seed
        with torch.no_grad():
            for name, p in self.named():
                if name.startswith((f"blocks.{spec.num_layers - 1}.", "head.")):
                    p.copy_(initial_value(spec, name, p.shape, seed=seed))
