"""Engines: one rank's part of a training run under one framework.

`Engine` is the interface. `Holdings` are the tensors that a rank holds, by category. A `TrafficSource` reports traffic
that does not go through `torch.distributed`. `DataParallelEngine` is the base of engines that run a whole model on
every rank's part of the batch: it provides micro-batches, mixed precision by autocast, loss scaling and clipping.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshmark.adapter.contract import Feature
from meshmark.models.module import Model, Recomputer, build_model, drawn_name, parameter_shapes
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import Schedule, build_schedule, loss_share, parameter_groups
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.precision import Dtype, LossScaling
from meshmark.spec.workload import Workload
from meshmark.theory.traffic import OneTimeTraffic

# --- Full tensors, gathered one at a time.

Gather = Callable[[], Sequence[Tensor]]
"""A collective call, and what it brings together."""


class Gathered(Mapping[str, Tensor]):
    """Full tensors by name. Each is gathered when it is read; all ranks must read the same ones in the same order.

    The result of the last gather is kept until the next.
    """

    def __init__(self, calls: Iterable[tuple[Sequence[str], Gather]]) -> None:
        """`calls` pairs names with the function that gathers their tensors, in that order."""
        self._places = {name: (gather, i) for names, gather in calls for i, name in enumerate(names)}
        self._last: tuple[Gather, Sequence[Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        gather, place = self._places[name]
        if self._last is None or self._last[0] is not gather:
            self._last = None  # makes room for the next
            self._last = gather, gather()
        return self._last[1][place]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


# --- Traffic that does not go through `torch.distributed`.


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A call of a communication library on one rank."""

    kind: str
    """As `meshmark.theory.traffic` has it: all_reduce, all_gather, reduce_scatter, broadcast, send, ..."""
    ranks: tuple[int, ...]
    """Ranks of the group, in order; for a send or a receive, both ends."""
    num_bytes: int
    """Bytes of the full tensor: the output of an all-gather, the input of a reduce-scatter."""


class TrafficSource(Protocol):
    """Source that reports the traffic of a communication library over intervals of a step.

    It reads the library's own log, not the algorithm that is judged by the result.
    """

    def start(self) -> None:
        """Start counting, until `stop`. A step has several such intervals."""

    def stop(self) -> None:
        """Stop counting."""

    def requested(self) -> Sequence[Transfer]:
        """Return the transfers that the framework called for in all intervals. Call it after they are over."""

    def issued(self) -> Sequence[Transfer]:
        """Return the transfers that the library issued for them."""


# --- The tensors that a rank holds, by category.


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The tensors that a rank holds right now, by category. Meters count their storages, each once.

    An engine only *names* storages here. The meter takes its totals from the allocator, and counts live storages
    without a name as `other`.
    """

    parameters: list[Tensor] = field(default_factory=list)
    """Local parameters or shards, in every precision that is kept (bf16 weights and fp32 masters both)."""
    gradients: list[Tensor] = field(default_factory=list)
    optimizer_states: list[Tensor] = field(default_factory=list)
    """Moments; master weights are parameters."""
    communication: list[Tensor] = field(default_factory=list)
    """Buffers that live between steps for the sake of communication, such as gradient buckets."""


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of every distinct, non-empty storage behind `tensors`, by address."""
    storages = (t.untyped_storage() for t in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}


# --- Interface of an engine: one rank's part of a training run under one framework.


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Rank, device and backend that an engine is built for. The default process group exists before `build`."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    """gloo or nccl."""
    scratch: Path
    """Folder for this case alone. It is removed after the case."""


_MISSING = "this engine has no `{}`: write it, or name Feature.{} in its adapter's `Capabilities.lacks`"


class Engine(ABC):
    """Engine of one rank: its part of a training run under one framework."""

    @abstractmethod
    def backward(self, batch: Batch) -> Tensor:
        """Run the forward and backward passes of this rank's part of a global batch, and reduce the gradients.

        `batch` is a whole *global* batch on the CPU. Afterwards, all reductions over ranks are done. The gradient is
        that of the mean over all unmasked tokens of the global batch, before clipping.

        Returns this rank's share of the loss, a scalar on any device. The shares of all ranks add up to the global
        mean. A rank that computes no loss, or the same loss as another rank, returns zero.

        Under an algorithm whose replicas may differ, replicas take some steps alone. The gradient of such a step is
        that of dp times this replica's share of the loss, reduced over the ranks of the replica only.
        """

    @abstractmethod
    def update(self) -> Tensor | None:
        """Clip, step the optimizer, run what the workload's algorithm adds to a step, and clear the gradients.

        Returns the global norm, before clipping, of the gradients that were stepped on. Returns None if the framework
        does not report it.
        """

    def step(self, batch: Batch) -> Tensor:
        """Run one whole optimizer step, which is what is timed. Returns what `backward` returns."""
        loss = self.backward(batch)
        self.update()
        return loss

    def unfreeze(self) -> None:
        """Train the parameters that the workload froze until now as well. Called between two steps.

        An adapter whose engine has it says so in `Capabilities.unfreezes`.
        """
        raise NotImplementedError(_MISSING.format("unfreeze", Feature.UNFREEZE.name))

    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """Return the full value of every parameter of which this rank holds a part, by canonical name.

        A collective call. Returns master weights if there are any. A replica that holds all of a tensor returns its
        own values, without communication with other replicas.
        """

    @abstractmethod
    def gradients(self) -> Mapping[str, Tensor]:
        """Return the full reduced, unclipped gradients, like `parameters`. Call it between `backward` and `update`."""

    def loss_scale(self) -> float:
        """Return the factor that the loss of this step was multiplied by, so that small gradients do not vanish.

        Call it when `gradients` may be called.
        """
        return 1.0

    def server_versions(self) -> tuple[int | None, int | None] | None:
        """Return the versions of a parameter server in the last updated step, or None without a parameter server.

        They are the version that this replica's push made, and the version that its fetch returned. Each is None if the
        step had no such call. The initial values are version 0, and each applied push makes the next version. Call it
        like `parameters`.
        """
        return None

    def buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers of this rank's replica by canonical name, such as a batch norm's running statistics.

        There are none by default. Nothing is communicated, because replicas' buffers may differ.
        """
        return {}

    @abstractmethod
    def holdings(self) -> Holdings:
        """Return the tensors that this rank holds right now, by category."""

    def traffic_source(self) -> TrafficSource | None:
        """Return the source of collectives that do not go through `torch.distributed`; None if there are none.

        Collectives of `torch.distributed` itself are always observed.
        """
        return None

    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's share of the evaluation loss of a global batch, without dropout and gradients.

        It must not affect the next step.
        """
        raise NotImplementedError(_MISSING.format("evaluate", Feature.EVALUATE.name))

    def save(self, folder: Path) -> None:
        """Save all that training needs to continue to `folder`. A collective call.

        The folder exists, and all ranks share it.
        """
        raise NotImplementedError(_MISSING.format("save", Feature.SAVE.name))

    def load(self, folder: Path) -> None:
        """Restore the state that an engine saved to `folder`. A collective call, before the first step.

        The layout may differ from that of the saving engine, unless the adapter lacks `Feature.RESHARD`.
        """
        raise NotImplementedError(_MISSING.format("load", Feature.SAVE.name))

    def enter_fake_world(self) -> None:  # noqa: B027
        """Set what peers would send before the first step. Called after `build`, in a fake world only.

        In a fake world peers do not exist. Every collective ends at once, and received messages are zeros. An engine
        whose framework exchanges shapes, or waits for a reply, sets these values here. If it cannot, its adapter lists
        `Feature.FAKE_WORLD` in `Capabilities.lacks`, with the reason.
        """

    def close(self) -> None:  # noqa: B027
        """Release resources that outlive the process."""


# --- Base of engines that run a whole model on every rank's part of the batch.

AnyModel = TypeVar("AnyModel", bound=Model)
PYTORCHS_CHECKPOINT: Recomputer = functools.partial(checkpoint, use_reentrant=False)
AUTOCAST = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}


def initial_model(case: Case, device: torch.device) -> Model:
    """Return the whole model on `device` with its initial values, in float64 or float32."""
    with device:
        model = build_model(case.workload.model)
    model.initialize(case.workload.seed)
    return configure(model.double() if case.precision.master is Dtype.FP64 else model, case)


def configure(model: AnyModel, case: Case, recompute: Recomputer = PYTORCHS_CHECKPOINT) -> AnyModel:
    """Freeze parameters of `model`, recompute and compile its blocks, as the case asks, and return it.

    Blocks are compiled whole, with whatever wraps them later.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.workload.trains_at_first(drawn_name(model.spec, name)))
    if case.layout.recompute is Recompute.FULL:
        model.recompute = recompute
    if case.tuning.compile:
        compile_blocks(model)
    return model


def compile_blocks(model: Model) -> None:
    """Compile each block of `model` as one graph, with PyTorch's default compiler."""
    for block in model.blocks.values():
        block.compile(fullgraph=True)


def begin_step(engine: Engine, workload: Workload, step: int) -> Batch:
    """Return the global batch of `step`, and unfreeze what the workload trains from this step on."""
    if step == workload.unfreeze_step:
        engine.unfreeze()
    return make_batch(workload, step)


def skip_block(module: nn.Module, batch: Batch, workload: Workload) -> None:
    """Set the block that `batch` leaves out on the model inside `module`.

    Does nothing if `workload` has no such steps. Walking all modules takes a few percent of a tiny model's step, a
    cost that a hand-written script does not have.
    """
    if workload.skipped_block is None:
        return
    for part in module.modules():
        if isinstance(part, Model):
            part.skipped_block = batch.skipped_block


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


class DataParallelEngine(Engine):
    """Trains `module` on this rank's rows.

    Gradients are averaged over data-parallel ranks, as every framework does by default. The loss is scaled so that
    this average is the gradient of the global mean.
    """

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.case, self.context, self.module, self.optimizer = case, context, module, optimizer
        scaled = case.precision.loss_scaling is LossScaling.DYNAMIC
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=scaled)
        self.schedule = self.make_schedule()

    def make_schedule(self) -> Schedule | None:
        """Return PyTorch's scheduler, or None if the rate is constant or the framework has its own scheduler."""
        return build_schedule(self.case.workload.optimizer, self.optimizer)

    @property
    def dp_rank(self) -> int:
        """Index of this rank's shard of the batch."""
        return self.case.layout.coordinates(self.context.rank).dp

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Return a context for the passes of one micro-batch. It defers the reduction unless `last`."""
        yield

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs (logits), computed in this engine's precision."""
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

    def unfreeze(self) -> None:
        """Give the optimizer the parameters that were frozen, as groups of their own, as in fastai and Lightning."""
        newly = [(name, p) for name, p in self.named_parameters() if not p.requires_grad]
        for _, parameter in newly:
            parameter.requires_grad_()
        for group in parameter_groups(self.case.workload.optimizer, newly):
            if group["params"]:
                self.optimizer.add_param_group(group)

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
        """Write one file from the first rank, because every rank holds the whole state."""
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
        """Load the schedule and its current rate, which PyTorch's schedulers leave to the optimizer's state."""
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


def rebuilt_buckets(case: Case) -> OneTimeTraffic:
    """Return the traffic of DDP when it rebuilds its buckets in the order of gradients of the first step.

    In the second step, rank 0 broadcasts the index of each parameter and the size of each bucket
    (`Reducer::sync_bucket_indices`). The bound assumes one bucket per parameter.
    """
    model = case.workload.model
    count = model.num_tensors if isinstance(model, OwnModelConfig) else len(parameter_shapes(model))
    return OneTimeTraffic(
        kind="broadcast",
        steps=(1,),
        most_bytes=4 * (2 * count + 1),
        most_calls=2,
        reason="buckets are made again after the first step, and rank 0 tells which",
    )
