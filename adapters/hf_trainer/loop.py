"""Runs `transformers.Trainer` and stops it where gradients are complete and where a step is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.data_parallel import initial_model
from meshmark.adapter.engine import RankContext
from meshmark.adapter.loop import NUM_STEPS, Loop
from meshmark.adapters.accelerate.prepare import choose_device, prove
from meshmark.adapters.hf_trainer.rows import collator, loss_function
from meshmark.errors import AdapterError
from meshmark.reference.objective import build_optimizer, build_schedule
from meshmark.spec.case import Case


class HFLoop(Loop):
    """A Trainer under DDP. `arguments`: of `TrainingArguments`, beyond those of every case."""

    def __init__(self, case: Case, context: RankContext, arguments: dict[str, Any]) -> None:
        super().__init__(case, context)
        self.arguments = arguments
        self.trainer: Any = None

    def run(self, checkpoint: Path | None) -> None:
        choose_device(self.context)
        self.prepare()
        self.trainer = self.make_trainer()
        self.hook()
        found = None if checkpoint is None else str(_checkpoint_in(checkpoint))
        self.trainer.train(resume_from_checkpoint=found)

    def prepare(self) -> None:
        """Say to the process what no argument of the Trainer says."""
        # Accelerate would otherwise name DDP's device by local rank, which is wrong where ranks share a GPU.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"

    def training_arguments(self) -> dict[str, Any]:
        """Return what every case asks of `TrainingArguments`; nothing is logged, and nothing saved unless asked for."""
        spec = self.case.workload.optimizer
        return {
            "output_dir": str(self.context.scratch / "trainer"),
            "per_device_train_batch_size": self.rows_per_micro_batch,
            "gradient_accumulation_steps": self.case.layout.num_micro_batches,
            "max_steps": NUM_STEPS,
            "max_grad_norm": spec.clip_norm or 0.0,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            "use_cpu": self.context.device.type == "cpu",
            "ddp_backend": self.context.backend,
            "ddp_find_unused_parameters": self.case.workload.leaves_unused,
            "ddp_broadcast_buffers": False,
            "seed": self.case.workload.seed,
            "dataloader_pin_memory": False,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **self.arguments,
        }

    def optimizers(self, model: nn.Module) -> tuple[Any, Any]:
        """Return the optimizer and the schedule that the Trainer is given; None leaves it to its arguments."""
        spec = self.case.workload.optimizer
        optimizer = build_optimizer(spec, model.named_parameters())
        schedule = build_schedule(spec, optimizer)
        return optimizer, schedule or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def trainer_class(self) -> type[Any]:
        """Return the class that trains; a subclass of the Trainer's would be judged as it is."""
        from transformers import Trainer

        return Trainer

    def make_trainer(self) -> Any:  # noqa: ANN401
        """Build the Trainer as a user would."""
        from transformers import TrainingArguments

        model = initial_model(self.case, self.context.device)
        return self.trainer_class()(
            model=model,
            args=TrainingArguments(**self.training_arguments()),
            train_dataset=self.rows,
            data_collator=collator(self.case.workload),
            compute_loss_func=loss_function(self.case.workload),
            optimizers=self.optimizers(model),
        )

    def hook(self) -> None:
        """Add what calls this loop back. No method is overridden that computes anything."""
        trainer = self.trainer
        trainer.add_callback(_callback(self))
        self._losses: list[Tensor] = []
        step, clip = trainer.training_step, trainer.accelerator.clip_grad_norm_

        def training_step(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
            loss: Tensor = step(*args, **kwargs)
            self._losses.append(loss)
            return loss

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.complete()
            norm = clip(*args, **kwargs)
            self.clipped_norm = norm
            return norm

        trainer.training_step = training_step
        trainer.accelerator.clip_grad_norm_ = clip_grad_norm_

    def complete(self) -> None:
        """Stop with the loss that was differentiated, of which DDP and FSDP average the gradients over ranks."""
        total = torch.stack(self._losses).sum() / self.case.layout.dp
        self._losses.clear()
        self.gradients_complete(total)

    def prove(self) -> None:
        """Raise `AdapterError` unless the Trainer trains by what it was asked for."""
        wrapped = self.trainer.model_wrapped
        on_cpu = self.context.device.type == "cpu"
        active = isinstance(wrapped, DistributedDataParallel)
        prove(self.trainer.accelerator, "MULTI_CPU" if on_cpu else "MULTI_GPU", active, wrapped)

    def begun(self) -> None:
        """Stop before the first step."""
        if self.case.layout.dp > 1:
            self.prove()
        optimizer = self.trainer.optimizer
        self.ready(self.trainer.model_wrapped, getattr(optimizer, "optimizer", optimizer))

    def done(self) -> None:
        """Stop after a step, with the norm that clipping has returned."""
        clips = self.case.workload.optimizer.clip_norm is not None
        self.step_done(self.clipped_norm if clips else None)

    def save_to(self, folder: Path) -> None:
        self.trainer.args.output_dir = str(folder)
        self.trainer.control.should_save = True


def _callback(loop: HFLoop) -> Any:  # noqa: ANN401
    from transformers import TrainerCallback

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
            loop.begun()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
            loop.done()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
            loop.saved()

    return Stops()


def _checkpoint_in(folder: Path) -> Path:
    found = sorted(folder.glob("checkpoint-*"))
    if not found:
        raise AdapterError(f"{folder}: the Trainer has left no checkpoint there")
    return found[-1]
