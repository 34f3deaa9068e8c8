"""Base of engines that run a whole model on every rank's part of the batch.

It provides micro-batches, mixed precision by autocast, loss scaling and clipping.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.holdings import Holdings
from meshmark.reference.build import build_model
from meshmark.reference.data import Batch
from meshmark.reference.model import Model, Recomputer, drawn_name
from meshmark.reference.objective import Schedule, build_schedule, loss_share
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Dtype, LossScaling
from meshmark.spec.workload import Workload

AnyModel = TypeVar("AnyModel", bound=Model)
PYTORCHS_CHECKPOINT: Recomputer = functools.partial(checkpoint, use_reentrant=False)
AUTOCAST = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}


def initial_model(case: Case, device: torch.device) -> Model:
    """The whole model on `device` with its initial values, in float64 or float32."""
    with device:
        model = build_model(case.workload.model)
    model.initialize(case.workload.seed)
    return configure(model.double() if case.precision.master is Dtype.FP64 else model, case)


def configure(model: AnyModel, case: Case, recompute: Recomputer = PYTORCHS_CHECKPOINT) -> AnyModel:
    """`model`, with what the case freezes frozen, with recomputation where it asks for it, and its blocks compiled
    where that is its tuning: whole, with whatever wraps them later."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.workload.trains(drawn_name(model.spec, name)))
    if case.layout.recompute is Recompute.FULL:
        model.recompute = recompute
    if case.tuning.compile:
        compile_blocks(model)
    return model


def compile_blocks(model: Model) -> None:
    """Each as one graph, by PyTorch's default compiler."""
    for block in model.blocks.values():
        block.compile(fullgraph=True)


def skip_block(module: nn.Module, batch: Batch, workload: Workload) -> None:
    """Tell the model inside `module` which of its blocks `batch` leaves out. Only where `workload` has such steps: to
    walk all modules is a few percent of a tiny model's step, which a hand-written script does not pay."""
    if workload.skipped_block is None:
        return
    for part in module.modules():
        if isinstance(part, Model):
            part.skipped_block = batch.skipped_block


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


class DataParallelEngine(Engine):
    """Trains `module` on this rank's rows. Gradients are left averaged over data-parallel ranks, as every framework
    does by default; the loss is scaled so that this average is the global mean."""

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.case, self.context, self.module, self.optimizer = case, context, module, optimizer
        scaled = case.precision.loss_scaling is LossScaling.DYNAMIC
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=scaled)
        self.schedule = self.make_schedule()

    def make_schedule(self) -> Schedule | None:
        """PyTorch's scheduler; None when the rate is constant, or when the framework has its own."""
        return build_schedule(self.case.workload.optimizer, self.optimizer)

    @property
    def dp_rank(self) -> int:
        """Which of the batch's shards is this rank's."""
        return self.case.layout.coordinates(self.context.rank).dp

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward: put off the reduction unless `last`."""
        yield

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's outputs (logits) under this engine's precision."""
        dtype = AUTOCAST.get(self.case.precision.compute)
        casts = torch.autocast(self.context.device.type, dtype=dtype) if dtype else contextlib.nullcontext()
        with casts:
            logits: Tensor = self.module(inputs)
        return logits

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        return loss_share(outputs, batch, self.case.workload.loss, chunked=self.case.tuning.chunked_loss)

    def part(self, batch: Batch) -> Batch:
        """This replica's rows of a global batch."""
        return batch.shard(self.dp_rank, self.case.layout.dp)

    def backward(self, batch: Batch) -> Tensor:
        layout = self.case.layout
        part = self.part(batch).to(self.context.device)
        skip_block(self.module, batch, self.case.workload)
        total = torch.zeros((), device=self.context.device)
        for i, micro in enumerate(part.micro_batches(layout.num_micro_batches)):
            with self.micro_batch(last=i == layout.num_micro_batches - 1):
                share = self.loss_share(self.forward(micro.inputs), micro)
                self.differentiate(share * layout.dp)
            total = total + share.detach()
        self.finish_gradients()
        return total

    def differentiate(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def finish_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def update(self) -> Tensor | None:
        clip = self.case.workload.optimizer.clip_norm
        norm = None if clip is None else self.clip(clip)
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale() if self.schedule else 0.0
        self.scaler.update()
        self.forget_gradients()
        if self.schedule and self.scaler.get_scale() >= scale:  # else the step was left out, and the schedule waits
            self.advance_schedule()
        return norm

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def advance_schedule(self) -> None:
        if self.schedule:
            self.schedule.step()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        layout = self.case.layout
        part = self.part(batch).to(self.context.device)
        skip_block(self.module, batch, self.case.workload)
        self.module.eval()
        shares = [self.loss_share(self.forward(m.inputs), m) for m in part.micro_batches(layout.num_micro_batches)]
        self.module.train()
        return torch.stack(shares).sum()

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Live parameters by canonical name."""
        yield from self.inner().named_parameters()

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def gradients(self) -> Mapping[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.named_parameters() if parameter.grad is not None}

    def loss_scale(self) -> float:
        return float(self.scaler.get_scale())

    def buffers(self) -> Mapping[str, Tensor]:
        return {name: buffer.detach() for name, buffer in self.inner().named_buffers()}

    def save(self, folder: Path) -> None:
        """Every rank holds all of it: the first writes one file."""
        if self.context.rank == 0:
            torch.save(self.state(), folder / "state.pt")
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        """Load the state through the host.

        An optimizer moves its moments to their parameters, but leaves the count of steps on the device it was loaded
        to. On a GPU it would be read back for every parameter at every step.
        """
        self.load_state(torch.load(folder / "state.pt", map_location="cpu"))

    def state(self) -> dict[str, Any]:
        """All that training needs to go on, as PyTorch's own state dicts."""
        return {
            "model": self.inner().state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner().load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.load_schedule(state["schedule"])

    def schedule_state(self) -> dict[str, Any] | None:
        return self.schedule.state_dict() if self.schedule else None

    def load_schedule(self, state: dict[str, Any] | None) -> None:
        """With the rate that it had come to, which PyTorch's schedulers leave to the optimizer's state."""
        if self.schedule and state is not None:
            self.schedule.load_state_dict(state)
            for group, rate in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    def inner(self) -> nn.Module:
        """The model inside its wrapper, whose parameters have canonical names."""
        return self.module

    def holdings(self) -> Holdings:
        parameters = list(self.module.parameters())
        return Holdings(
            parameters=[p.detach() for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer_states=optimizer_state_tensors(self.optimizer),
        )
