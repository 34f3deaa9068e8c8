"""Hugging Face Accelerate: plain data parallelism, and its FSDP2 and DeepSpeed plugins.

Everything goes through the `Accelerator`'s own `prepare`, `accumulate`, `backward` and `clip_grad_norm_`. It divides
the loss by the number of micro-batches, so the shares, which add up to the mean, are multiplied by it first
(Accelerate's recipe for batches of unequal numbers of tokens). With `cpu=True` Accelerate silently ignores both
plugins, so every adapter here checks that its choices are in effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature, Requirement, Summing
from meshmark.adapter.engine import AUTOCAST, DataParallelEngine, Engine, RankContext
from meshmark.adapters.accelerate.prepare import (
    TakesSeveral,
    backend_arguments,
    choose_device,
    deepspeed_plugin,
    inner_of,
    mixed_precision,
    name_as_on_gpu,
    prepare_parts,
    prove,
    prove_ddp,
    runs_on_cpus,
    sharding_accelerator,
    whole_batches,
)
from meshmark.adapters.ddp import DDPBuckets, DDPRecommended, DDPStatic
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.config import prepare
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine, is_deepspeed
from meshmark.adapters.fsdp2 import FSDP2, FSDP2Engine, fsdp2_exceptions, row_extra_memory
from meshmark.models.module import block_classes
from meshmark.models.transformer import Family
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import OneTimeTraffic, Sharding, TrafficException, reduced_each, sharded_recipe

REQUIREMENT = Requirement(module="accelerate", distribution="accelerate")
FP16_IS_FP32 = (
    "on a CPU Accelerate drops it without a word and trains in float32; on a GPU, where it would scale the loss, it "
    "has never been run here"
)


class _ThroughAccelerate(DataParallelEngine):
    """Micro-batches as Accelerate counts them. `prepared`: what `accelerator.prepare` returned, module,
    optimizer and schedule."""

    def __init__(self, case: Case, context: RankContext, accelerator: Any, prepared: tuple[Any, ...]) -> None:  # noqa: ANN401
        module, optimizer, schedule = prepared
        super().__init__(case, context, module, optimizer)
        self.accelerator, self.schedule = accelerator, schedule

    def make_schedule(self) -> None:
        """Make no schedule, because `prepare` wraps the one that it is given."""

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.accelerator.accumulate(self.module):
            assert self.accelerator.sync_gradients == last
            yield

    def differentiate(self, loss: Tensor) -> None:
        self.accelerator.backward(loss * self.case.layout.num_micro_batches)


def without_copies(recipe: TrainingRecipe) -> TrainingRecipe:
    """Return `recipe` with gradients that accumulate in DDP's buckets, because every micro-batch is reduced."""
    return dataclasses.replace(recipe, backward=dataclasses.replace(recipe.backward, accumulates_outside_buckets=False))


class AccelerateEngine(_ThroughAccelerate):
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)  # `prepare` wraps autocast around forward, or FSDP2 casts
        return logits

    def finish_gradients(self) -> None:
        """Do nothing: DDP or FSDP2 has reduced the gradients, and they are not scaled."""

    def update(self) -> Tensor | None:
        max_norm = self.case.workload.optimizer.clip_norm
        norm = None if max_norm is None else self.clip(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.advance_schedule()
        return norm

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = self.accelerator.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm


class AccelerateDDPEngine(AccelerateEngine):
    def inner(self) -> nn.Module:
        return inner_of(self.module)


class Accelerate(Adapter):
    through: ClassVar[type[AccelerateDDPEngine]] = AccelerateDDPEngine
    requires: ClassVar = (REQUIREMENT,)
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST, divides=True)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        lacks={
            Precision.FP16: FP16_IS_FP32,
            Precision.BF16_REDUCE_BF16: "its comm_hook is PyTorch's own function, which DDP lets run on NCCL alone",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return DDP's. Accelerate wraps the model of a process that is alone in nothing."""
        return eager_recipe(case, "eager-ddp" if case.world_size > 1 else "eager")

    def build(self, case: Case, context: RankContext) -> Engine:
        choose_device(context)
        from accelerate import Accelerator, DistributedDataParallelKwargs

        if context.world_size == 1:
            name_as_on_gpu(context)
        # Accelerate would otherwise name DDP's device by local rank, which is wrong where ranks share a GPU.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        accelerator = Accelerator(
            cpu=runs_on_cpus(context),
            mixed_precision=mixed_precision(case),
            dataloader_config=whole_batches(),
            **self.accumulation(case),
            **self.arguments(),
            kwargs_handlers=[
                backend_arguments(context),
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=True,
                    broadcast_buffers=False,  # each replica keeps its own statistics, as the workload defines them
                    find_unused_parameters=case.workload.leaves_unused,
                    **self.ddp_arguments(),
                ),
            ],
        )
        prepared = prepare_parts(accelerator, case, context)
        prove_ddp(accelerator, context, prepared[0])
        return self.through(case, context, accelerator, prepared)

    def arguments(self) -> dict[str, Any]:
        """Return the further arguments that a variant gives the `Accelerator`."""
        return {}

    def ddp_arguments(self) -> dict[str, Any]:
        """Return the further arguments that a variant gives DDP."""
        return {}

    def accumulation(self, case: Case) -> dict[str, Any]:
        """Return the arguments that say how micro-batches are accumulated."""
        return {"gradient_accumulation_steps": case.layout.num_micro_batches}


class AccelerateSyncEach(TakesSeveral, Accelerate):
    """`sync_each_batch`: gradients are reduced after every micro-batch."""

    arithmetic: ClassVar = dataclasses.replace(Accelerate.arithmetic, reduces_each=True)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return without_copies(super().recipe(case))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return reduced_each(case, rank)

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """DDP lays out buckets anew in the second pass that reduces: with accumulation, in the first step."""
        found = super().one_time_traffic(case, rank)
        if case.layout.num_micro_batches == 1:
            return found
        return tuple(dataclasses.replace(each, steps=(0,)) for each in found)

    def accumulation(self, case: Case) -> dict[str, Any]:
        from accelerate.utils import GradientAccumulationPlugin

        plugin = GradientAccumulationPlugin(num_steps=case.layout.num_micro_batches, sync_each_batch=True)
        return {"gradient_accumulation_plugin": plugin}


class AccelerateBuckets(TakesSeveral, Accelerate):
    """DDP's buckets of 10 KiB, reduced by the hook of PowerSGD, which compresses nothing in its first steps."""

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return DDPBuckets.traffic_exceptions(case, rank)

    def ddp_arguments(self) -> dict[str, Any]:
        from accelerate.utils import DDPCommunicationHookType

        return {
            "bucket_cap_mb": DDPBuckets.bucket_cap_mb,
            "comm_hook": DDPCommunicationHookType.POWER_SGD,
            "comm_state_option": {"start_powerSGD_iter": 1_000_000},
        }


class AccelerateStatic(AccelerateSyncEach):
    """DDP's `static_graph`, with a reduction after every micro-batch, for it breaks without
    (adapters/gaps/ddp_static_graph_no_sync.py)."""

    capabilities: ClassVar = dataclasses.replace(
        AccelerateSyncEach.capabilities,
        lacks={**AccelerateSyncEach.capabilities.lacks, Feature.UNUSED: DDPStatic.capabilities.lacks[Feature.UNUSED]},
    )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return DDPStatic.traffic_exceptions(case, rank)

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Return the one-time traffic of a static graph: buckets are laid out anew in the third forward pass, whatever
        its step."""
        found, rounds = DDPStatic.one_time_traffic(case, rank), case.layout.num_micro_batches
        if rounds == 1:
            return found
        third = 2 // rounds
        return tuple(dataclasses.replace(each, steps=(third,)) if each.kind == "broadcast" else each for each in found)

    def ddp_arguments(self) -> dict[str, Any]:
        return {"static_graph": True}


class UnderAccelerate(DDPRecommended):
    """DDP with its defaults, as Accelerate wraps it around a model, but not around that of a process that is alone."""

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return super().extra_memory(case, rank) if case.world_size > 1 else ()


class AccelerateFSDP2Engine(FSDP2Engine, AccelerateEngine):
    micro_batch = AccelerateEngine.micro_batch  # FSDP2Engine switches the reduction itself, which is Accelerate's here
    save, load = AccelerateEngine.save, AccelerateEngine.load  # and saves by PyTorch alone

    def evaluate(self, batch: Batch) -> Tensor:
        share = super().evaluate(batch)
        self.module.reshard()  # type: ignore[operator]  # Accelerate's root stays whole until a backward pass
        return share


class AccelerateFSDP2(Adapter):
    """Accelerate's FSDP2 plugin. Every block is sharded on its own, and the rest with the model.

    In bf16, weights are gathered in bf16 from fp32 shards, as by `adapters.fsdp2`, and gradients are reduced in the
    precision that the case asks for (Accelerate's own choice would be bf16).
    """

    requires: ClassVar[tuple[Requirement, ...]] = (REQUIREMENT,)
    preload: ClassVar[tuple[str, ...]] = ("deepspeed",)
    """Accelerate imports it, where it is installed, to see whether a model is DeepSpeed's."""
    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, reduces_each=True, divides=True, sums=Summing.BLOCKS)
    capabilities: ClassVar = Capabilities(
        dtensors=True,
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        zero_stages=frozenset({3}),
        unfreezes=True,
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16, Precision.BF16_REDUCE_BF16}),
        lacks={**FSDP2.capabilities.lacks, Precision.FP16: FP16_IS_FP32},
    )
    sharding: ClassVar = Sharding(reshards_root=False)
    """Accelerate leaves the root to `fully_shard`, which keeps it whole from forward to backward."""
    reduces_each: ClassVar[bool] = True
    """Whether every micro-batch's gradients are reduced."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return cls.sharding.invalid_reason(case.layout) or super().supports(case, device, backend)

    @classmethod
    def sharding_of(cls, case: Case) -> Sharding:
        """Return how a case is sharded: alone, a process reduces once a step (`Accelerator.accumulate`)."""
        return cls.sharding if case.world_size > 1 else dataclasses.replace(cls.sharding, reduces_within=False)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        using = eager_recipe(case, "eager-fsdp2", casts_weights=True)
        return sharded_recipe(using, cls.sharding_of(case), case.layout.num_micro_batches)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return row_extra_memory(case, rank, cls.sharding, cls.recipe(case).states)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return fsdp2_exceptions(case, rank, cls.sharding)

    def arguments(self, case: Case) -> dict[str, Any]:
        """Return the further arguments that a variant gives the `Accelerator`."""
        return {}

    def build(self, case: Case, context: RankContext) -> Engine:
        choose_device(context)
        from torch.distributed.fsdp import FSDPModule

        name_as_on_gpu(context)
        accelerator = self.accelerator(case, context)
        prepared = prepare_parts(accelerator, case, context)
        prove(accelerator, "FSDP", accelerator.is_fsdp2 and isinstance(prepared[0], FSDPModule), prepared[0])
        return AccelerateFSDP2Engine(case, context, accelerator, prepared)

    def accelerator(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        """Return an `Accelerator` that is configured by a plugin in the code."""
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecisionPolicy

        low, reduced = AUTOCAST.get(case.precision.compute), getattr(torch, case.precision.reduction)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted(kind.__name__ for kind in block_classes(case.workload.model)),
            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced) if low else None,
        )
        return sharding_accelerator(case, context, plugin, sync_each_batch=self.reduces_each, **self.arguments(case))


class AccelerateFSDP2NoSync(AccelerateFSDP2):
    """Without `sync_each_batch`, Accelerate's default: gradients are reduced once a step, and are whole until then."""

    sharding: ClassVar = Sharding(reshards_root=False, reduces_within=False)
    arithmetic: ClassVar = dataclasses.replace(AccelerateFSDP2.arithmetic, reduces_each=False)
    reduces_each: ClassVar = False


class AccelerateHSDP(AccelerateFSDP2):
    """Its n-dimensional `ParallelismConfig` with two replicas, each sharded over half of the ranks. With an axis of
    tensor parallelism beside them it wants `transformers`."""

    sharding: ClassVar = Sharding(reshards_root=False, replicas=2)

    def arguments(self, case: Case) -> dict[str, Any]:
        from accelerate import ParallelismConfig

        replicas = self.sharding.replicas
        sizes = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=case.layout.dp // replicas)
        return {"parallelism_config": sizes}


class _StepLater:
    """Proxy of a DeepSpeed engine whose `step` does nothing.

    Accelerate's `backward` calls `step` right after the last micro-batch, but the gradients must be read first.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401
        self._engine = engine

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._engine, name)

    def step(self) -> None:
        pass


class AccelerateDeepSpeedEngine(_ThroughAccelerate, DeepSpeedEngine):
    def __init__(self, case: Case, context: RankContext, accelerator: Any, prepared: tuple[Any, ...]) -> None:  # noqa: ANN401
        super().__init__(case, context, accelerator, prepared)
        accelerator.deepspeed_engine_wrapped.engine = _StepLater(prepared[0])

    def update(self) -> Tensor | None:
        norm = super().update()
        self.advance_schedule()  # Accelerate gives DeepSpeed none of PyTorch's schedulers to step
        return norm


class AccelerateDeepSpeed(DeepSpeed):
    """The same configuration as the adapter `deepspeed`, given to Accelerate's plugin."""

    requires: ClassVar[tuple[Requirement, ...]] = (REQUIREMENT, *DeepSpeed.requires)
    arithmetic: ClassVar = Arithmetic(
        casting=Casting.WEIGHTS, divides=True, sums=Summing.MODULES, adds_biases_apart_at=frozenset({3})
    )
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        lacks={
            **DeepSpeed.capabilities.lacks,
            Feature.RESHARD: "load_state reads no universal checkpoints of DeepSpeed",
        },
    )

    def plugin(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        return deepspeed_plugin(self.config(case, context))

    def plugins(self, case: Case, context: RankContext) -> dict[str, Any]:
        """Return the argument that gives Accelerate the plugin."""
        return {"deepspeed_plugin": self.plugin(case, context)}

    def loaders(self, case: Case) -> tuple[DataLoader[Any], ...]:
        """Return the loaders that are prepared with the model. By default none: an engine is handed its batches."""
        return ()

    def build(self, case: Case, context: RankContext) -> Engine:
        choose_device(context)
        prepare(context)
        from accelerate import Accelerator

        accelerator = Accelerator(
            **self.plugins(case, context),
            kwargs_handlers=[backend_arguments(context)],
            dataloader_config=whole_batches(),
            gradient_accumulation_steps=case.layout.num_micro_batches,
        )
        prepared = prepare_parts(accelerator, case, context, self.loaders(case))
        module = prepared[0]
        active = is_deepspeed(module) and module.zero_optimization_stage() == case.layout.zero_stage
        prove(accelerator, "DEEPSPEED", active, module)
        engine = AccelerateDeepSpeedEngine(case, context, accelerator, prepared)
        engine.restore_masters()
        return engine
