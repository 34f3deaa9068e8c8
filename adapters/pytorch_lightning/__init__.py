"""`lightning.Trainer` as it is: DDP, FSDP1 and, by `ModelParallelStrategy`, FSDP2.

The Trainer gets a `LightningModule` as its user writes it. Loading, accumulation, reduction, clipping, the optimizer's
step, the schedule and checkpoints are its own. It counts no tokens: the loss of `training_step` is a share in that of
the global batch, times what Lightning divides it by. `lightning-trainer-recommended` is as in
Lightning's examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from meshmark.adapter.contract import Capabilities, Requirement, Track
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, LoopEngine
from meshmark.adapters.ddp import DDP
from meshmark.adapters.fsdp1 import FSDP1, FSDP1Engine
from meshmark.adapters.fsdp2 import FSDP2
from meshmark.models.module import block_classes, sizes_by_block
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.workload import Loss
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException

REQUIRES = (Requirement(module="pytorch_lightning", distribution="pytorch-lightning"), GREENLET)
_SIGNAL_BYTES = 8
_CPU = frozenset({"cpu"})
"""Devices on which the adapters have been tested."""


def signal_broadcast(case: Case) -> TrafficException:
    """Rank 0 says before every micro-batch whether it was sent SIGTERM (`training_epoch_loop`)."""
    ranks, count = tuple(range(case.layout.dp)), case.layout.num_micro_batches
    told = Flow(
        kind="broadcast",
        axes="dp",
        ranks=ranks,
        purpose=Purpose.LOSS,
        num_bytes=_SIGNAL_BYTES * count,
        fewest=count,
        most=count,
    )
    return TrafficException(sends=(told,), reason="every micro-batch begins with whether rank 0 was sent SIGTERM")


def gradients_stay(case: Case) -> tuple[ExtraMemory, ...]:
    """Return the memory of gradients between steps. Lightning frees them just before the next step's are computed."""
    num_bytes = case.precision.accumulation.itemsize * case.workload.model.num_parameters / case.layout.dp
    reason = "gradients are there until the first backward pass of the next step"
    planned = "of which the peak has a plan of its own"
    return (
        ExtraMemory(category="steady", num_bytes=num_bytes, reason=reason),
        ExtraMemory(category="peak", num_bytes=-num_bytes, reason=planned),
    )


def fsdp_peak(case: Case) -> tuple[ExtraMemory, ...]:
    """Return what is there besides at the peak, in the backward pass of the loss.

    Lightning runs `training_step` inside FSDP's wrapper: FSDP prefetches the last block before the loss's backward.
    Under `no_sync`, by which Lightning accumulates, gradients are whole and not shards.
    """
    itemsize, model = case.precision.accumulation.itemsize, case.workload.model
    *_, last = (sizes for block, sizes in sizes_by_block(model).items() if block)
    reason = "the last block is gathered before the backward pass of the loss, which is computed inside the wrapper"
    found = [ExtraMemory(category="peak", num_bytes=itemsize * sum(last), reason=reason)]
    if case.layout.num_micro_batches > 1:
        not_sharded = itemsize * model.num_parameters * (1 - 1 / case.layout.dp)
        reason = "gradients are accumulated whole"
        found.append(ExtraMemory(category="peak", num_bytes=not_sharded, reason=reason))
    return tuple(found)


def reduced_once(case: Case, exceptions: tuple[TrafficException, ...]) -> tuple[TrafficException, ...]:
    """Return FSDP1's `exceptions` with the flow of gradients sent once a step, as after `no_sync`."""
    count = case.layout.num_micro_batches

    def once(flow: Flow) -> Flow:
        if flow.purpose is not Purpose.GRADIENTS:
            return flow
        return dataclasses.replace(
            flow, num_bytes=flow.num_bytes // count, fewest=flow.fewest // count, most=flow.most // count
        )

    return tuple(dataclasses.replace(each, sends=tuple(map(once, each.sends))) for each in exceptions)


class LightningTrainer(DDP):
    """`lightning.Trainer` with `DDPStrategy`."""

    requires: ClassVar[tuple[Requirement, ...]] = REQUIRES
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}), families=frozenset(Family), devices=_CPU, lacks=LOOP_LACKS
    )
    as_examples: ClassVar[bool] = False

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return (*super().traffic_exceptions(case, rank), signal_broadcast(case))

    def build(self, case: Case, context: RankContext) -> Engine:
        from pytorch_lightning.strategies import DDPStrategy

        from meshmark.adapters.pytorch_lightning.loop import LightningLoop

        strategy = DDPStrategy(
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # each replica keeps its own statistics, as the workload defines them
            find_unused_parameters=case.workload.leaves_unused,
        )
        return LoopEngine(case, context, LightningLoop(case, context, strategy, as_examples=self.as_examples))


class LightningTrainerRecommended(LightningTrainer):
    """As Lightning's examples have it: the loss of a micro-batch is the mean over its own targets, as `F.cross_entropy`
    returns it, and the loader has no state, so that a run resumed amid an epoch reads its first rows again."""

    track: ClassVar = Track.AUTHORS
    as_examples: ClassVar = True

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.loss is Loss.OWN:
            return f"{case.adapter} does not support a user's own loss, of which it knows no mean"
        return super().supports(case, device, backend)


class LightningFSDPEngine(LoopEngine, FSDP1Engine):  # type: ignore[override]
    """A loop that has wrapped a `LightningModule` in FSDP1."""

    def parameters(self) -> Mapping[str, Tensor]:
        return _Renamed(super().parameters())

    def gradients(self) -> Mapping[str, Tensor]:
        return _Renamed(super().gradients())


class _Renamed(Mapping[str, Tensor]):
    """Tensors of a `LightningModule` by the names that they have in its model."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[f"model.{name}"]

    def __contains__(self, name: object) -> bool:
        return f"model.{name}" in self._tensors

    def __iter__(self) -> Any:  # noqa: ANN401
        return (name.removeprefix("model.") for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class LightningTrainerFSDP(FSDP1):
    """`FSDPStrategy`. It refuses a CPU, but no subclass of it; that one names the device."""

    requires: ClassVar[tuple[Requirement, ...]] = REQUIRES
    capabilities: ClassVar = Capabilities(
        degrees=FSDP1.capabilities.degrees,
        zero_stages=FSDP1.capabilities.zero_stages,
        families=FSDP1.capabilities.families,
        devices=_CPU,
        recomputes=frozenset({Recompute.NONE}),
        lacks={**FSDP1.capabilities.lacks, **LOOP_LACKS},
    )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return (*reduced_once(case, super().traffic_exceptions(case, rank)), signal_broadcast(case))

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return (*super().extra_memory(case, rank), *fsdp_peak(case))

    def build(self, case: Case, context: RankContext) -> Engine:
        from pytorch_lightning.strategies import FSDPStrategy
        from torch.distributed.fsdp import FullyShardedDataParallel

        from meshmark.adapters.pytorch_lightning.loop import LightningFSDPLoop

        class Strategy(FSDPStrategy):  # type: ignore[misc]
            def _setup_model(self, model: nn.Module) -> nn.Module:
                made: nn.Module = FullyShardedDataParallel(
                    model,
                    mixed_precision=self.mixed_precision_config,
                    sharding_strategy=self.sharding_strategy,
                    device_id=context.device,
                    **self.kwargs,
                )
                return made

        strategy = Strategy(
            auto_wrap_policy=block_classes(case.workload.model),
            sharding_strategy=self.strategy,
            state_dict_type="sharded",
        )
        return LightningFSDPEngine(case, context, LightningFSDPLoop(case, context, strategy))


class LightningTrainerFSDP2(FSDP2):
    """`ModelParallelStrategy`, with `fully_shard` in `configure_model` as PyTorch's tutorial has it."""

    requires: ClassVar[tuple[Requirement, ...]] = REQUIRES
    capabilities: ClassVar = dataclasses.replace(
        LightningTrainer.capabilities,
        dtensors=True,
        zero_stages=frozenset({3}),
        lacks={**FSDP2.capabilities.lacks, **LOOP_LACKS},
    )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return (*super().traffic_exceptions(case, rank), signal_broadcast(case))

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return (*super().extra_memory(case, rank), *gradients_stay(case))

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """On one rank the peak may be in the forward pass, beside the last step's gradients, of which there is no plan.

        In several micro-batches backward passes have as many gradients, and more besides.
        """
        using, layout = super().recipe(case), case.layout
        return dataclasses.replace(using, peak_known=using.peak_known and layout.dp * layout.num_micro_batches > 1)

    def build(self, case: Case, context: RankContext) -> Engine:
        from pytorch_lightning.strategies import ModelParallelStrategy
        from torch.distributed.fsdp import fully_shard

        from meshmark.adapters.pytorch_lightning.loop import LightningFSDP2Loop

        def parallelize(model: Any, mesh: Any) -> None:  # noqa: ANN401
            for block in model.blocks.values():
                fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=True)
            fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=True)

        strategy = ModelParallelStrategy(data_parallel_size=case.layout.dp, tensor_parallel_size=1)
        loop = LightningFSDP2Loop(case, context, strategy, parallelize=parallelize)
        return LoopEngine(case, context, loop)
