"""Trainers that own their loop and are wrong in it, as subclasses by users are: of `transformers.Trainer`, and loops
around `lightning.Trainer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.loop import LoopEngine
from meshmark.reference.data import Batch
from meshmark.spec.case import Case


class BrokenTrainer(Adapter):
    """Trains by a wrong subclass of the Trainer."""

    loop: Any

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        """Return the wrong subclass."""
        raise NotImplementedError

    def build(self, case: Case, context: RankContext) -> Engine:
        broken, real = self.broken, self.loop

        class BrokenLoop(real):  # type: ignore[misc]
            def trainer_class(self) -> type[Any]:
                return broken(super().trainer_class())

        type(self).loop = BrokenLoop
        try:
            return super().build(case, context)  # type: ignore[safe-super]
        finally:
            type(self).loop = real


class DividesLossTwice(BrokenTrainer):
    """`compute_loss` divides by the number of micro-batches what is divided by the number of tokens already."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Divides(trainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                return super().compute_loss(*args, **kwargs) / self.args.gradient_accumulation_steps

        return Divides


class DividesByOwnTokens(BrokenTrainer):
    """`num_items_in_batch` is this rank's number of tokens times the number of ranks."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Own(trainer):
            def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:  # noqa: ANN401
                own = sum((batch["labels"] != -100).sum() for batch in batch_samples)
                return own * self.args.world_size

        return Own


class CountsPadding(BrokenTrainer):
    """`num_items_in_batch` counts the masked labels too."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Counts(trainer):
            def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:  # noqa: ANN401
                return torch.tensor(sum(batch["labels"].numel() for batch in batch_samples) * self.args.world_size)

        return Counts


class NeverLeavesNoSync(BrokenTrainer):
    """The last micro-batch is under `no_sync` as well."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Never(trainer):
            def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                with model.no_sync():
                    return super().training_step(model, *args, **kwargs)

        return Never


class ClipsTwice(BrokenTrainer):
    """Gradients are clipped, and what is left is clipped to half of the norm."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Twice(trainer):
            def _clip_grad_norm(self, model: nn.Module) -> Any:  # noqa: ANN401
                norm = super()._clip_grad_norm(model)
                nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm / 2)
                return norm

        return Twice


class ClipsEachTensor(BrokenTrainer):
    """Every gradient is clipped by its own norm."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Each(trainer):
            def _clip_grad_norm(self, model: nn.Module) -> Any:  # noqa: ANN401
                norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
                for parameter in model.parameters():
                    nn.utils.clip_grad_norm_([parameter], self.args.max_grad_norm)
                return norm

        return Each


class KeepsGradients(BrokenTrainer):
    """Nobody sets the gradients to zero after a step."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Keeps(trainer):
            def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                model, loader = super()._prepare_for_training(*args, **kwargs)
                model.zero_grad = lambda set_to_none=True: None
                return model, loader

        return Keeps


class DropsLastMicroBatch(BrokenTrainer):
    """The last micro-batch of a step adds nothing."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Drops(trainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                loss = super().compute_loss(*args, **kwargs)
                return loss * 0 if self.accelerator.sync_gradients else loss

        return Drops


class SameRowsOnAllRanks(BrokenTrainer):
    """The loader is not told of the ranks: each reads the same rows."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Same(trainer):
            def get_train_dataloader(self) -> Any:  # noqa: ANN401
                prepare = self.accelerator.prepare
                self.accelerator.prepare = lambda loader: loader
                try:
                    return super().get_train_dataloader()
                finally:
                    self.accelerator.prepare = prepare

        return Same


class ShiftsLabelsAgain(BrokenTrainer):
    """`compute_loss` shifts labels that are shifted already."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Shifts(trainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                inputs = {**inputs, "labels": inputs["labels"].roll(-1, 1)}
                return super().compute_loss(model, inputs, *args, **kwargs)

        return Shifts


class StepsScheduleTwice(BrokenTrainer):
    """A callback steps the schedule that the Trainer steps."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        from transformers import TrainerCallback

        class Steps(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:  # noqa: ANN401
                lr_scheduler.step()

        class Twice(trainer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
                super().__init__(*args, **kwargs)
                self.add_callback(Steps())

        return Twice


class FreezesFirstBlock(BrokenTrainer):
    """A part of the model is frozen by the Trainer's subclass, as for a warm-up that never ends."""

    @classmethod
    def broken(cls, trainer: type[Any]) -> type[Any]:
        class Freezes(trainer):
            def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(not name.startswith("blocks.0."))
                super().__init__(model, *args, **kwargs)

        return Freezes


class BrokenLightning(Adapter):
    """Trains by a wrong loop around Lightning's Trainer."""

    @staticmethod
    def broken(loop: type[Any]) -> type[Any]:
        """Return the wrong loop."""
        raise NotImplementedError

    def build(self, case: Case, context: RankContext) -> Engine:
        engine: Any = super().build(case, context)  # type: ignore[safe-super]
        engine.loop.__class__ = self.broken(type(engine.loop))
        return engine  # type: ignore[no-any-return]


class ClipsByValue(BrokenLightning):
    """`gradient_clip_algorithm="value"`."""

    @staticmethod
    def broken(loop: type[Any]) -> type[Any]:
        class Values(loop):
            def make_trainer(self) -> Any:  # noqa: ANN401
                trainer = super().make_trainer()
                trainer.gradient_clip_algorithm = type(trainer.gradient_clip_algorithm or _algorithm())("value")
                return trainer

        return Values


def _algorithm() -> Any:  # noqa: ANN401
    from pytorch_lightning.utilities.enums import GradClipAlgorithmType

    return GradClipAlgorithmType.NORM


class MeansOfMicroBatches(BrokenLightning):
    """`training_step` returns the mean of its own micro-batch."""

    @staticmethod
    def broken(loop: type[Any]) -> type[Any]:
        class Means(loop):
            def loss_of(self, outputs: Tensor, rows: Batch) -> Tensor:
                loss: Tensor = super().loss_of(outputs, rows)
                layout = self.case.layout
                return loss / (layout.dp * layout.num_micro_batches) * rows.total_weight / rows.weights.sum()

        return Means


class DividesByMicroBatches(BrokenLightning):
    """`training_step` divides by the number of micro-batches what Lightning divides by it."""

    @staticmethod
    def broken(loop: type[Any]) -> type[Any]:
        class Divides(loop):
            def loss_of(self, outputs: Tensor, rows: Batch) -> Tensor:
                loss: Tensor = super().loss_of(outputs, rows) / self.case.layout.num_micro_batches
                return loss

        return Divides


class StepsScheduleByMicroBatch(BrokenLightning):
    """A hook steps the schedule after every micro-batch."""

    @staticmethod
    def broken(loop: type[Any]) -> type[Any]:
        class Steps(loop):
            def loss_of(self, outputs: Tensor, rows: Batch) -> Tensor:
                for config in self.trainer.lr_scheduler_configs:
                    config.scheduler.step()
                loss: Tensor = super().loss_of(outputs, rows)
                return loss

        return Steps


class BrokenScript(Adapter):
    """Runs a wrong loop around Accelerate: what `spoil` does to the `Accelerator` or the optimizer before training."""

    loop: Any

    @staticmethod
    def spoil(accelerator: Any, optimizer: Any) -> None:  # noqa: ANN401
        raise NotImplementedError

    def build(self, case: Case, context: RankContext) -> Engine:
        spoil, real = self.spoil, self.loop

        class BrokenLoop(real):  # type: ignore[misc]
            def train(self, model: Any, optimizer: Any, batches: Any) -> None:  # noqa: ANN401
                spoil(self.accelerator, optimizer)
                super().train(model, optimizer, batches)

        return LoopEngine(case, context, BrokenLoop(case, context))


class ForgetsNumProcesses(BrokenScript):
    """The loss is not multiplied by the number of processes, over which DDP averages."""

    @staticmethod
    def spoil(accelerator: Any, optimizer: Any) -> None:  # noqa: ANN401
        real = accelerator.backward
        accelerator.backward = lambda loss: real(loss / accelerator.num_processes)


class CountsOwnLabels(BrokenScript):
    """Labels are not gathered: every process divides by its own number, times the number of processes."""

    @staticmethod
    def spoil(accelerator: Any, optimizer: Any) -> None:  # noqa: ANN401
        accelerator.gather = lambda count: count * accelerator.num_processes


class NeverClears(BrokenScript):
    """`optimizer.zero_grad()` is forgotten."""

    @staticmethod
    def spoil(accelerator: Any, optimizer: Any) -> None:  # noqa: ANN401
        optimizer.zero_grad = lambda: None
