"""Runs `lightning.Trainer` and stops it where gradients are complete and where a step is done."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from meshmark.adapter.engine import RankContext, initial_model
from meshmark.adapter.loop import NUM_STEPS, Dealing, Loop, collate
from meshmark.adapters.fsdp1 import canonical
from meshmark.errors import AdapterError
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, build_schedule, loss_share
from meshmark.spec.case import Case
from meshmark.spec.workload import Loss

CHECKPOINT = "lightning.ckpt"
Parallelize = Callable[[nn.Module, Any], None]
"""Shards a model in place over a device mesh, as `configure_model` does under `ModelParallelStrategy`."""


class StatefulLoader(DataLoader[Batch]):
    """A loader that goes on where it was: Lightning saves and loads the state of loaders that have one.

    Without, a run that is resumed amid an epoch starts its data again from the first row.
    """

    _done = _first = 0

    def __iter__(self) -> Any:  # noqa: ANN401
        self._done, first, self._first = self._first, self._first, 0
        for batch in itertools.islice(super().__iter__(), first, None):
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return how many rows all ranks have read."""
        return {"rows": self._done * self._rows_at_once}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Leave out the rows that were read, by however many ranks in batches of whatever size."""
        self._first = state["rows"] // self._rows_at_once

    @property
    def _rows_at_once(self) -> int:
        assert isinstance(self.sampler, DistributedSampler) and self.batch_size is not None
        return self.sampler.num_replicas * self.batch_size


class LightningLoop(Loop):
    """A Trainer with a strategy that the adapter has made."""

    def __init__(
        self,
        case: Case,
        context: RankContext,
        strategy: Any,  # noqa: ANN401
        *,
        parallelize: Parallelize | None = None,
        as_examples: bool = False,
    ) -> None:
        """`as_examples`: the loss of a micro-batch is its own mean, and the loader has no state."""
        super().__init__(case, context, Dealing.ROWS)
        self.strategy, self.parallelize, self.as_examples = strategy, parallelize, as_examples
        self.losses: list[Tensor] = []
        self.saves_to: Path | None = None
        self.trainer: Any = None
        self.lightning_module: Any = None

    def run(self, checkpoint: Path | None) -> None:
        self.trainer = self.make_trainer()
        self.lightning_module = self.make_module()
        # The sampler that Lightning would put in is a shuffled one.
        sampler: DistributedSampler[Batch] = DistributedSampler(
            self.rows, num_replicas=self.case.layout.dp, rank=self.context.rank, shuffle=False, drop_last=True
        )
        kind = DataLoader if self.as_examples else StatefulLoader
        loader = kind(
            self.rows, batch_size=self.rows_per_micro_batch, sampler=sampler, collate_fn=_collate, num_workers=0
        )
        found = None if checkpoint is None else str(checkpoint / CHECKPOINT)
        self.trainer.fit(self.lightning_module, loader, ckpt_path=found)

    def make_trainer(self) -> Any:  # noqa: ANN401
        """Build the Trainer, with nothing that logs, validates or saves by itself."""
        from pytorch_lightning import Trainer
        from pytorch_lightning.plugins.environments import TorchElasticEnvironment

        on_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return Trainer(
            accelerator=self.context.device.type,
            devices=on_node,
            num_nodes=self.context.world_size // on_node,
            strategy=self.strategy,
            max_steps=NUM_STEPS,
            max_epochs=-1,
            accumulate_grad_batches=self.case.layout.num_micro_batches,
            gradient_clip_val=self.case.workload.optimizer.clip_norm,
            plugins=[TorchElasticEnvironment()],
            callbacks=[_stops(self)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=str(self.context.scratch),
        )

    def make_module(self) -> Any:  # noqa: ANN401
        """Return the `LightningModule` that a user would write for the workload."""
        from pytorch_lightning import LightningModule

        case, loop = self.case, self

        class Module(LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = initial_model(case, loop.context.device)

            def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
                rows = Batch(**batch)
                loss = loop.loss_of(self.model(rows.inputs), rows)
                loop.losses.append(loss.detach())
                return loss

            def configure_optimizers(self) -> Any:  # noqa: ANN401
                spec = case.workload.optimizer
                named = ((canonical(name).removeprefix("model."), p) for name, p in self.named_parameters())
                optimizer = build_optimizer(spec, named)
                schedule = build_schedule(spec, optimizer)
                if schedule is None:
                    return optimizer
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

            def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
                loop.clip(self, optimizer, *args, **kwargs)

            def configure_model(self) -> None:
                if loop.parallelize is not None and not loop.was_parallelized:
                    loop.was_parallelized = True
                    loop.parallelize(self.model, self.device_mesh)

        return Module()

    was_parallelized = False

    def loss_of(self, outputs: Tensor, rows: Batch) -> Tensor:
        """Return what `training_step` returns, which Lightning divides by the number of micro-batches and averages.

        As its documentation has it, a mean over the micro-batch; or the share in the mean over the global batch, times
        what Lightning divides it by.
        """
        layout, loss = self.case.layout, self.case.workload.loss
        if self.as_examples:
            assert loss is not Loss.OWN
            return loss_share(outputs, rows, loss) * (rows.total_weight / rows.weights.sum())
        return loss_share(outputs, rows, loss) * (layout.dp * layout.num_micro_batches)

    def clip(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Clip as a `LightningModule` does that does not override it."""
        from pytorch_lightning import LightningModule

        LightningModule.configure_gradient_clipping(module, optimizer, *args, **kwargs)

    def begun(self) -> None:
        """Stop before the first step. Raises `AdapterError` where Lightning trains by another strategy."""
        if self.trainer.strategy is not self.strategy or self.trainer.world_size != self.context.world_size:
            raise AdapterError(
                f"Lightning runs {self.trainer.strategy} over {self.trainer.world_size} ranks, expected "
                f"{self.strategy} over {self.context.world_size}"
            )
        self.prove(self.strategy.model)
        self.ready(self.strategy.model, self.trainer.optimizers[0])

    def prove(self, wrapped: nn.Module) -> None:
        """Raise `AdapterError` unless `wrapped` is what the strategy should have made."""
        if not isinstance(wrapped, nn.parallel.DistributedDataParallel):
            raise AdapterError(f"Lightning trains a {type(wrapped).__name__}, expected DistributedDataParallel")

    def inner(self) -> nn.Module:
        inner: nn.Module = self.lightning_module.model
        return inner

    def complete(self) -> None:
        """Stop with the loss that was differentiated, which Lightning divides by the number of micro-batches."""
        layout = self.case.layout
        total = torch.stack(self.losses).sum() / (layout.dp * layout.num_micro_batches)
        self.losses.clear()
        self.gradients_complete(total)

    def save_to(self, folder: Path) -> None:
        self.saves_to = folder

    def done(self) -> None:
        """Stop after a step, and save where that was asked for while the loop stood."""
        self.step_done(None)
        if self.saves_to is not None:
            self.trainer.save_checkpoint(self.saves_to / CHECKPOINT)
            self.saves_to = None
            self.saved()


class LightningFSDPLoop(LightningLoop):
    """Under FSDP1, of which Lightning refuses to clip by norm: its documentation has a user call FSDP's function."""

    def clip(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        max_norm = kwargs.get("gradient_clip_val", args[0] if args else None)
        if max_norm is not None:
            self.strategy.model.clip_grad_norm_(max_norm)

    def prove(self, wrapped: nn.Module) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not isinstance(wrapped, FullyShardedDataParallel):
            raise AdapterError(f"Lightning trains a {type(wrapped).__name__}, expected FullyShardedDataParallel")


class LightningFSDP2Loop(LightningLoop):
    """Under `ModelParallelStrategy`, whose user shards in `configure_model`."""

    def prove(self, wrapped: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not isinstance(self.inner(), FSDPModule):
            raise AdapterError(f"Lightning trains a {type(self.inner()).__name__}, expected an FSDPModule")


def _collate(rows: Sequence[Batch]) -> dict[str, Any]:
    """As a dict: Lightning moves tensors in frozen dataclasses to no device."""
    batch = collate(rows)
    return {
        "inputs": batch.inputs,
        "targets": batch.targets,
        "weights": batch.weights,
        "total_weight": batch.total_weight,
        "skipped_block": batch.skipped_block,
    }


def _stops(loop: LightningLoop) -> Any:  # noqa: ANN401
    from pytorch_lightning import Callback

    class Stops(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:  # noqa: ANN401
            loop.begun()

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:  # noqa: ANN401
            loop.complete()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:  # noqa: ANN401
            if (index + 1) % trainer.accumulate_grad_batches == 0:
                loop.done()

    return Stops()
