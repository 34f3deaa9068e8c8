"""Hugging Face Accelerate: plain data parallelism, and its FSDP2 and DeepSpeed plugins.

Everything goes through the `Accelerator`'s own `prepare`, `accumulate`, `backward` and `clip_grad_norm_`. It divides
the loss by the number of micro-batches, so the shares, which add up to the mean, are multiplied by it first
(Accelerate's recipe for batches of unequal numbers of tokens). With `cpu=True` Accelerate ignores both plugins without
a word: every adapter here proves that it got what it asked for.
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.capabilities import Capabilities, Feature, Requirement
from meshmark.adapter.contract import Adapter
from meshmark.adapter.data_parallel import AUTOCAST, DataParallelEngine, initial_model
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.config import ds_config, prepare
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine, is_deepspeed
from meshmark.adapters.fsdp2 import FSDP2Engine
from meshmark.errors import AdapterError
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Traffic, fully_sharded, step_traffic

_ACCELERATE = Requirement(module="accelerate", distribution="accelerate")
_FP16_IS_FP32 = "on a CPU Accelerate drops it without a word and trains in float32"


def prove(accelerator: Any, expected: str, active: bool, module: nn.Module) -> None:  # noqa: ANN401
    """Raise `AdapterError` unless Accelerate is in the mode that was asked for and `active` is true of the module."""
    mode = str(accelerator.distributed_type.value)
    if mode != expected or not active:
        raise AdapterError(
            f"Accelerate runs {mode} with a {type(module).__name__} where {expected} was asked for: it is not measured "
            f"under that name"
        )


class _ThroughAccelerate(DataParallelEngine):
    """Micro-batches as Accelerate counts them. `prepared`: what `accelerator.prepare` returned, module,
    optimizer and schedule."""

    def __init__(self, case: Case, context: RankContext, accelerator: Any, prepared: tuple[Any, ...]) -> None:  # noqa: ANN401
        module, optimizer, schedule = prepared
        super().__init__(case, context, module, optimizer)
        self.accelerator, self.schedule = accelerator, schedule

    def make_schedule(self) -> None:
        """`prepare` wraps it."""

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


class AccelerateEngine(_ThroughAccelerate):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits: Tensor = self.module(tokens_BT)  # `prepare` wraps autocast around forward, or FSDP2 casts
        return logits

    def finish_gradients(self) -> None:
        """Reduced by DDP or FSDP2, and never scaled."""

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
    module: DistributedDataParallel

    def inner(self) -> nn.Module:
        inner: nn.Module = self.module.module
        return inner


class Accelerate(Adapter):
    requires: ClassVar = (_ACCELERATE,)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        lacks={Precision.FP16: _FP16_IS_FP32},
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-ddp")

    def build(self, case: Case, context: RankContext) -> Engine:
        _choose_device(context)
        from accelerate import Accelerator, DistributedDataParallelKwargs

        on_cpu = context.device.type == "cpu"
        # Accelerate would otherwise name DDP's device by local rank, which is wrong where ranks share a GPU.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=_mixed_precision(case),
            gradient_accumulation_steps=case.layout.num_micro_batches,
            dataloader_config=_whole_batches(),
            kwargs_handlers=[
                _backend(context),
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=True, find_unused_parameters=case.workload.skipped_block is not None
                ),
            ],
        )
        prepared = _prepare(accelerator, case, context)
        prove(
            accelerator,
            "MULTI_CPU" if on_cpu else "MULTI_GPU",
            isinstance(prepared[0], DistributedDataParallel),
            prepared[0],
        )
        return AccelerateDDPEngine(case, context, accelerator, prepared)


class AccelerateFSDP2Engine(FSDP2Engine, AccelerateEngine):
    def evaluate(self, batch: Batch) -> Tensor:
        share = super().evaluate(batch)
        self.module.reshard()  # type: ignore[operator]  # Accelerate's root stays whole until a backward pass
        return share


class AccelerateFSDP2(Adapter):
    """Blocks are sharded each on its own, the rest with the model; bf16 as by `adapters.fsdp2`: bf16 weights are
    gathered from fp32 shards, and gradients reduced in fp32 (Accelerate's own choice would be bf16)."""

    requires: ClassVar = (_ACCELERATE,)
    preload: ClassVar = ("deepspeed",)
    """Accelerate imports it, where it is installed, to see whether a model is DeepSpeed's."""
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({3}),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        lacks={Precision.FP16: _FP16_IS_FP32},
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Accelerate leaves the root to `fully_shard`, which keeps it whole from forward to backward."""
        return dataclasses.replace(eager_recipe(case, "eager-fsdp2", casts_weights=True), keeps_root=True)

    @classmethod
    def traffic(cls, case: Case, rank: int) -> Traffic:
        """FSDP2's, but what is in no block is gathered once a micro-batch."""
        model = case.workload.model
        traffic = step_traffic(case, rank, fully_sharded(case))
        if case.layout.dp > 1:
            per_micro_batch = traffic["all_gather"] / model.num_parameters / 2
            traffic["all_gather"] -= per_micro_batch * _root_parameters(case)
        return traffic

    def build(self, case: Case, context: RankContext) -> Engine:
        _choose_device(context)
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import GradientAccumulationPlugin

        if context.device.type == "cpu":
            _allow_fsdp_on_cpu(context)
        low = AUTOCAST.get(case.precision)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32) if low else None,
        )
        accelerator = Accelerator(
            mixed_precision=_mixed_precision(case),
            fsdp_plugin=plugin,
            kwargs_handlers=[_backend(context)],
            dataloader_config=_whole_batches(),
            # By default whole gradients are accumulated and reduced once: no longer sharded.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=case.layout.num_micro_batches, sync_each_batch=True
            ),
        )
        prepared = _prepare(accelerator, case, context)
        prove(accelerator, "FSDP", accelerator.is_fsdp2 and isinstance(prepared[0], FSDPModule), prepared[0])
        return AccelerateFSDP2Engine(case, context, accelerator, prepared)


def _root_parameters(case: Case) -> int:
    """Embedding and head."""
    model = case.workload.model
    return model.num_parameters - model.num_layers * model.block_parameters


class _StepLater:
    """A DeepSpeed engine whose `step` waits: Accelerate's `backward` calls it at once after the last micro-batch, when
    gradients are still to be looked at."""

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

    requires: ClassVar[tuple[Requirement, ...]] = (_ACCELERATE, *DeepSpeed.requires)
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        lacks={
            **DeepSpeed.capabilities.lacks,
            Feature.RESHARD: "load_state reads no universal checkpoints of DeepSpeed",
        },
    )

    def build(self, case: Case, context: RankContext) -> Engine:
        _choose_device(context)
        prepare(context)
        from accelerate import Accelerator

        accelerator = Accelerator(
            deepspeed_plugin=_deepspeed_plugin(case),
            kwargs_handlers=[_backend(context)],
            dataloader_config=_whole_batches(),
            gradient_accumulation_steps=case.layout.num_micro_batches,
        )
        prepared = _prepare(accelerator, case, context)
        module = prepared[0]
        active = is_deepspeed(module) and module.zero_optimization_stage() == case.layout.zero_stage
        prove(accelerator, "DEEPSPEED", active, module)
        engine = AccelerateDeepSpeedEngine(case, context, accelerator, prepared)
        engine.restore_masters()
        return engine


def _choose_device(context: RankContext) -> None:
    """Accelerate by itself picks a GPU where there is one, and by local rank; this tells it which."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(context.device)


def _mixed_precision(case: Case) -> str:
    return case.precision.value if case.precision in AUTOCAST else "no"


def _whole_batches() -> Any:  # noqa: ANN401
    """Says that a batch is the global one. Otherwise Accelerate steps a schedule once for every rank, since each rank
    brings a batch of its own: a warm-up over 100 optimizer steps is over after 100 / ranks."""
    from accelerate import DataLoaderConfiguration

    return DataLoaderConfiguration(split_batches=True)


def _backend(context: RankContext) -> Any:  # noqa: ANN401
    """Tells Accelerate which backend the process group has."""
    from accelerate import InitProcessGroupKwargs

    return InitProcessGroupKwargs(backend=context.backend)


def _allow_fsdp_on_cpu(context: RankContext) -> None:
    """Accelerate heeds the FSDP plugin only in a mode with several accelerators, and its one mode for several CPUs
    (`cpu=True`) ignores plugins. So its shared state, which is on the CPU already, is given such a mode's name."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(backend=context.backend).distributed_type = DistributedType.MULTI_GPU


def _deepspeed_plugin(case: Case) -> Any:  # noqa: ANN401
    """Accelerate's plugin, which must not want `transformers`: it leaves its configuration there for `from_pretrained`,
    which nobody calls here, and fails when the package is not installed."""
    from accelerate import DeepSpeedPlugin

    class Plugin(DeepSpeedPlugin):  # type: ignore[misc]
        def set_deepspeed_weakref(self) -> None:
            pass

    return Plugin(hf_ds_config=ds_config(case), zero3_init_flag=False)


def _prepare(accelerator: Any, case: Case, context: RankContext) -> tuple[Any, ...]:  # noqa: ANN401
    """The model with its initial values, its optimizer and its schedule (or None), as Accelerate wraps them."""
    model, spec = initial_model(case, context.device), case.workload.optimizer
    optimizer = build_optimizer(spec, model.named_parameters())
    schedule = build_schedule(spec, optimizer)
    prepared = accelerator.prepare(model, optimizer, *([schedule] if schedule else []))
    return (*prepared, None) if schedule is None else tuple(prepared)
