"""Runs torchtitan's Trainer and stops it where gradients are complete and where a step is done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import RankContext
from meshmark.adapter.loop import NUM_STEPS, Dealing, Loop
from meshmark.adapters.fsdp2 import fill_named
from meshmark.errors import AdapterError
from meshmark.spec.case import Case

_NEVER = 2 * NUM_STEPS
"""An interval of steps that no run comes to."""


class TorchTitanLoop(Loop):
    """`torchtitan.trainer.Trainer` by its own configuration."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context, Dealing.ROWS)
        self.trainer: Any = None
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._restore: Any = lambda: None

    def run(self, checkpoint: Path | None) -> None:
        from meshmark.adapters.torchtitan import stand_ins  # before torchtitan

        stand_ins.stand_in_for_cuda()
        self.trainer = self.config(checkpoint or self.context.scratch / "torchtitan").build()
        if self.case.layout.pp > 1:
            stand_ins.take_micro_batches(self.trainer.pp_schedule)
        fill_named(self.named_parameters(), self.case)
        self.hook()
        self.trainer.train()

    def config(self, folder: Path) -> Any:  # noqa: ANN401
        """Return the Trainer's configuration; nothing is logged or compiled, and nothing saved unless asked for."""
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.components.metrics import MetricsProcessor
        from torchtitan.components.optimizer import LRSchedulersContainer
        from torchtitan.config.configs import DebugConfig
        from torchtitan.trainer import Trainer

        from meshmark.adapters.torchtitan.components import llama, no_tokenizer, row_loader

        spec = self.case.workload.optimizer
        return Trainer.Config(
            model_spec=llama(self.case.workload.transformer),
            dump_folder=str(folder),
            metrics=MetricsProcessor.Config(log_freq=_NEVER),
            tokenizer=no_tokenizer(),
            dataloader=row_loader(self.rows),
            optimizer=self.optimizer_config(),
            # A decay of no steps: the rate stays where the warm-up has brought it.
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=spec.warmup_steps, decay_ratio=0.0),
            training=self.training(),
            parallelism=self.parallelism(),
            checkpoint=CheckpointManager.Config(enable=True, interval=_NEVER, keep_latest_k=0),
            activation_checkpoint=None,
            debug=DebugConfig(seed=self.case.workload.seed),
            loss=CrossEntropyLoss.Config(),
        )

    def training(self) -> Any:  # noqa: ANN401
        """Return batch sizes, clipping and precision."""
        from torchtitan.config.configs import TrainingConfig

        layout, workload = self.case.layout, self.case.workload
        at_once = layout.num_micro_batches if layout.pp > 1 else 1
        return TrainingConfig(
            local_batch_size=self.rows_per_micro_batch * at_once,
            global_batch_size=workload.global_batch,
            seq_len=workload.transformer.seq_len,
            max_norm=workload.optimizer.clip_norm or math.inf,
            steps=NUM_STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        )

    def parallelism(self) -> Any:  # noqa: ANN401
        """Return the layout in torchtitan's words."""
        from torchtitan.config.configs import ParallelismConfig

        layout = self.case.layout
        return ParallelismConfig(
            data_parallel_shard_degree=layout.dp,
            tensor_parallel_degree=layout.tp,
            enable_sequence_parallel=layout.sequence_parallel,
            pipeline_parallel_degree=layout.pp,
            pipeline_parallel_microbatch_size=self.rows_per_micro_batch,
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=0,
            # torchtitan's default hands FSDP2 plain tensors beside `dp_mesh_dims`, which PyTorch 2.13 refuses.
            spmd_backend="partial_dtensor",
        )

    def optimizer_config(self) -> Any:  # noqa: ANN401
        """Return the workload's AdamW, in one group for all parameters."""
        from torchtitan.components.optimizer import OptimizersContainer, default_adamw

        spec = self.case.workload.optimizer
        made = default_adamw(spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
        return OptimizersContainer.Config(param_groups=made.param_groups, implementation="for-loop")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Live parameters of this rank's stage by canonical name."""
        from meshmark.adapters.torchtitan.components import canonical

        for part in self.trainer.model_parts:
            for name, parameter in part.named_parameters():
                yield canonical(name), parameter

    def hook(self) -> None:
        """Add what calls this loop back. Each method does what it did, and says that it was called."""
        from torchtitan.distributed import utils

        trainer, checkpointer = self.trainer, self.trainer.checkpointer
        begin, differentiate, step, save = (
            trainer.batch_generator,
            trainer.forward_backward_step,
            trainer.train_step,
            checkpointer.save,
        )
        clip = utils.clip_grad_norm_

        def batch_generator(*args: Any) -> Any:  # noqa: ANN401
            self.begun()
            return begin(*args)

        def forward_backward_step(**kwargs: Any) -> Tensor:  # noqa: ANN401
            loss: Tensor = differentiate(**kwargs)
            self._losses.append(loss.detach().clone())
            return loss

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
            self.complete()
            norm: Tensor = clip(*args, **kwargs)
            self._norm = norm
            return norm

        def train_step(*args: Any) -> None:  # noqa: ANN401
            step(*args)
            self.step_done(self._norm)

        def saved(*args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
            done: bool = save(*args, **kwargs)
            if done:
                checkpointer.interval = _NEVER
                self.saved()
            return done

        def restore() -> None:
            utils.clip_grad_norm_ = clip

        trainer.batch_generator, trainer.forward_backward_step = batch_generator, forward_backward_step
        trainer.train_step, checkpointer.save = train_step, saved
        utils.clip_grad_norm_ = clip_grad_norm_
        self._restore = restore

    def begun(self) -> None:
        """Stop before the first step. Raises `AdapterError` unless the model is wrapped as it was asked for."""
        from torch.distributed.fsdp import FSDPModule

        parts = self.trainer.model_parts
        if len(parts) != 1 or not isinstance(parts[0], FSDPModule):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise AdapterError(f"torchtitan trains {kinds}, expected one FSDPModule")
        whole: nn.Module = self.trainer.model_parts[0]
        self.ready(whole, self.trainer.optimizers.optimizers[0])

    def complete(self) -> None:
        """Stop with the loss that was differentiated: of this rank's tokens, divided by the number of all.

        If several ranks compute the same loss, the first of them reports it. Stages before the last have no loss and
        return -1.
        """
        stands, layout = self.case.layout.coordinates(self.context.rank), self.case.layout
        total = torch.stack(self._losses).sum()
        self._losses.clear()
        tells = stands.tp == 0 and stands.pp == layout.pp - 1
        self.gradients_complete(total if tells else torch.zeros_like(total))

    def save_to(self, folder: Path) -> None:
        checkpointer = self.trainer.checkpointer
        checkpointer.folder, checkpointer.interval = str(folder / "checkpoint"), 1

    def close(self) -> None:
        self._restore()
