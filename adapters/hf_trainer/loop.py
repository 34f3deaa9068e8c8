"""Runs `transformers.Trainer` and stops it where gradients are complete and where a step is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import RankContext, initial_model
from meshmark.adapter.loop import NUM_STEPS, Dealing, Loop
from meshmark.adapters.accelerate.prepare import choose_device, name_as_on_gpu, prove, prove_ddp
from meshmark.adapters.deepspeed.config import ds_config
from meshmark.adapters.deepspeed.config import prepare as prepare_deepspeed
from meshmark.adapters.deepspeed.engine import is_deepspeed
from meshmark.adapters.hf_trainer.rows import collator, loss_function, model_collator
from meshmark.errors import AdapterError
from meshmark.models.module import block_classes, skeleton
from meshmark.reference.objective import build_optimizer, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerSpec


class HFLoop(Loop):
    """A Trainer under DDP. `arguments`: of `TrainingArguments`, beyond those of every case."""

    def __init__(self, case: Case, context: RankContext, arguments: dict[str, Any]) -> None:
        super().__init__(case, context, Dealing.MICRO_BATCHES)
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

    def configure(self) -> None:
        """Change what `TrainingArguments` have set up in this process."""
        if self.context.world_size == 1:
            name_as_on_gpu(self.context)

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
        return optimizer, schedule_of(spec, optimizer)

    def trainer_class(self) -> type[Any]:
        """Return the class that trains; a subclass of the Trainer's would be judged as it is."""
        from transformers import Trainer

        found: type[Any] = Trainer
        return found

    def make_trainer(self) -> Any:  # noqa: ANN401
        """Build the Trainer as a user would."""
        # First, for under DeepSpeed's stage 3 `TrainingArguments` change how Transformers builds models.
        model = initial_model(self.case, self.context.device)
        arguments = self.arguments_class()(**self.training_arguments())
        self.configure()
        return self.trainer_class()(args=arguments, optimizers=self.optimizers(model), **self.what_is_trained(model))

    def arguments_class(self) -> type[Any]:
        """Return the class of the Trainer's arguments."""
        from transformers import TrainingArguments

        found: type[Any] = TrainingArguments
        return found

    def what_is_trained(self, model: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the Trainer's arguments for the model, the data, what the model takes of them and its loss."""
        workload = self.case.workload
        return {
            "model": model,
            "train_dataset": self.rows,
            "data_collator": collator(workload),
            "compute_loss_func": loss_function(workload),
        }

    def hook(self) -> None:
        """Add what calls this loop back. No method is replaced: each does what it did, and says that it was called."""
        trainer = self.trainer
        trainer.add_callback(_callback(self))
        self._losses: list[Tensor] = []
        differentiate = trainer.accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:  # noqa: ANN401
            self._losses.append(loss.detach().clone())
            differentiate(loss, **kwargs)

        trainer.accelerator.backward = backward
        self.hook_clipping()

    def hook_clipping(self) -> None:
        """Stop where the Trainer clips, as it does once a step, with an infinite norm where it is not to clip."""
        accelerator = self.trainer.accelerator
        clip = accelerator.clip_grad_norm_

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.complete()
            self.clipped_norm = clip(*args, **kwargs)
            return self.clipped_norm

        accelerator.clip_grad_norm_ = clip_grad_norm_

    def complete(self) -> None:
        """Stop with the loss that was differentiated. Every wrapper here averages its gradients over ranks."""
        total = torch.stack(self._losses).sum() / self.case.layout.dp
        self._losses.clear()
        self.gradients_complete(total)

    def prove(self) -> None:
        """Raise `AdapterError` unless the Trainer trains by what it was asked for."""
        prove_ddp(self.trainer.accelerator, self.context, self.trainer.model_wrapped)

    def begun(self) -> None:
        """Stop before the first step."""
        self.prove()
        optimizer = self.trainer.optimizer
        self.ready(self.trainer.model_wrapped, getattr(optimizer, "optimizer", optimizer))

    def done(self) -> None:
        """Stop after a step, with the norm that clipping has returned."""
        norm = self.norm_before_clipping() if self.case.workload.optimizer.clip_norm is not None else None
        self.step_done(norm)

    def norm_before_clipping(self) -> Tensor:
        """Return the norm of this step, as the Trainer would log it."""
        norm: Tensor = self.clipped_norm
        return norm

    def save_to(self, folder: Path) -> None:
        self.trainer.args.output_dir = str(folder)
        self.trainer.control.should_save = True


def making_optimizer(trainer: type[Any], case: Case) -> type[Any]:
    """Return `trainer` with the workload's optimizer, by the methods that its documentation says to override."""
    spec = case.workload.optimizer

    class MakingOptimizer(trainer):  # type: ignore[misc]
        optimizer: Any
        lr_scheduler: Any

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:  # noqa: ANN401
            if self.optimizer is None:
                named = (self.model if model is None else model).named_parameters()
                self.optimizer = build_optimizer(spec, named)
            found: torch.optim.Optimizer = self.optimizer
            return found

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ANN401
            self.lr_scheduler = schedule_of(spec, self.optimizer if optimizer is None else optimizer)
            return self.lr_scheduler

    return MakingOptimizer


def schedule_of(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401
    """Return the workload's schedule, of a constant rate where it has none: the Trainer's own would end at zero."""
    return build_schedule(spec, optimizer) or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class HFModelLossLoop(HFLoop):
    """A Trainer that is given a model of Transformers alone, and takes the loss that the model computes."""

    def what_is_trained(self, model: Any) -> dict[str, Any]:  # noqa: ANN401
        self.whole = model
        return {
            "model": model.model,
            "train_dataset": self.rows,
            "data_collator": model_collator(self.case.workload),
        }

    def inner(self) -> nn.Module:
        """Return the workload's module around the model, whose names are canonical."""
        whole: nn.Module = self.whole
        return whole


class HFOwnOptimizerLoop(HFLoop):
    """A Trainer that makes its optimizer of its arguments."""

    def training_arguments(self) -> dict[str, Any]:
        return {**super().training_arguments(), **optimizer_arguments(self.case.workload.optimizer)}

    def optimizers(self, model: nn.Module) -> tuple[Any, Any]:
        return None, None


def optimizer_arguments(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the workload's AdamW and its schedule as `TrainingArguments` take them."""
    return {
        "optim": "adamw_torch",
        "learning_rate": spec.learning_rate,
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "adam_epsilon": spec.eps,
        "weight_decay": spec.weight_decay,
        "lr_scheduler_type": "constant_with_warmup" if spec.warmup_steps else "constant",
        "warmup_steps": spec.warmup_steps,
    }


class HFFSDP2Loop(HFLoop):
    """A Trainer under FSDP2."""

    def training_arguments(self) -> dict[str, Any]:
        blocks = sorted(kind.__name__ for kind in block_classes(self.case.workload.model))
        return {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": blocks},
            # Otherwise whole gradients would be accumulated and reduced once: no longer sharded.
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
            **super().training_arguments(),
        }

    def trainer_class(self) -> type[Any]:
        """Return a Trainer that makes the workload's optimizer. Under FSDP it refuses a given one."""
        return making_optimizer(super().trainer_class(), self.case)

    def optimizers(self, model: nn.Module) -> tuple[Any, Any]:
        return None, None

    def configure(self) -> None:
        """On a CPU Accelerate would train by DDP, whatever it is asked for."""
        name_as_on_gpu(self.context)

    def prove(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        wrapped, accelerator = self.trainer.model_wrapped, self.trainer.accelerator
        prove(accelerator, "FSDP", accelerator.is_fsdp2 and isinstance(wrapped, FSDPModule), wrapped)

    def norm_before_clipping(self) -> Tensor:
        norm: Any = self.clipped_norm
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


class HFDeepSpeedLoop(HFLoop):
    """A Trainer under DeepSpeed's ZeRO, by a configuration as its documentation has it."""

    def prepare(self) -> None:
        """The skeleton is built first, and kept: see `close`."""
        super().prepare()
        skeleton(self.case.workload.model)
        prepare_deepspeed(self.context)

    def configure(self) -> None:
        """Leave Accelerate in DeepSpeed's mode."""

    def close(self) -> None:
        """Under ZeRO-3 Transformers partitions every model that is built while `TrainingArguments` live."""
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()

    def training_arguments(self) -> dict[str, Any]:
        return {**super().training_arguments(), "deepspeed": ds_config(self.case)}

    def trainer_class(self) -> type[Any]:
        """Return a Trainer that makes the workload's optimizer. Under DeepSpeed it silently drops a given one."""
        return making_optimizer(super().trainer_class(), self.case)

    def optimizers(self, model: nn.Module) -> tuple[Any, Any]:
        return None, None

    def inner(self) -> nn.Module:
        inner: nn.Module = self.trainer.deepspeed.module
        return inner

    def hook_clipping(self) -> None:
        """Nothing yet: DeepSpeed clips inside its engine's step, and there is no engine before training starts."""

    def begun(self) -> None:
        engine = self.trainer.deepspeed
        step = engine.step

        def stepped(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            if engine.is_gradient_accumulation_boundary():
                self.complete()
            step(*args, **kwargs)

        engine.step = stepped
        self.prove()
        self.ready(engine, engine.optimizer)

    def prove(self) -> None:
        engine = self.trainer.model_wrapped
        active = is_deepspeed(engine) and engine.zero_optimization_stage() == self.case.layout.zero_stage
        prove(self.trainer.accelerator, "DEEPSPEED", active, engine)

    def norm_before_clipping(self) -> Tensor:
        return torch.as_tensor(self.trainer.deepspeed.get_global_grad_norm())


class HFGivenOptimizerLoop(HFDeepSpeedLoop):
    """A Trainer under DeepSpeed that is given its optimizer, as under DDP; its own arguments say the same."""

    def training_arguments(self) -> dict[str, Any]:
        return {**super().training_arguments(), **optimizer_arguments(self.case.workload.optimizer)}

    def trainer_class(self) -> type[Any]:
        return HFLoop.trainer_class(self)

    def optimizers(self, model: nn.Module) -> tuple[Any, Any]:
        return HFLoop.optimizers(self, model)


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
