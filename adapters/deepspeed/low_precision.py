"""DeepSpeed in bf16 by other choices: how gradients get into float32, no search for overflows, and no ZeRO."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import DataParallelEngine, Engine, Holdings, RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.replicated import DeepSpeedZero0, ReplicatedEngine
from meshmark.adapters.deepspeed.traffic_exceptions import keeps_whole_gradients
from meshmark.errors import AdapterError
from meshmark.models.module import initial_value
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Purpose, TrafficException


class DeepSpeedBF16(DeepSpeed):
    """`immediate_grad_update`: at stage 1 a gradient is added to its float32 sum as soon as it is there. Gradients are
    not searched for overflows (`check_grad_overflow: false`), and buffers stay in float32."""

    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        precisions=frozenset({Precision.BF16}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Precision.FP32: "its choices are of bf16",
            Precision.FP16: "its choices are of bf16",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Stage 1 keeps no gradient in bf16 beside its float32 sum."""
        using = super().recipe(case)
        if not keeps_whole_gradients(case):
            return using
        return dataclasses.replace(using, states=dataclasses.replace(using.states, gradient_bytes=4))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        found = super().traffic_exceptions(case, rank)
        return tuple(each for each in found if not any(flow.purpose is Purpose.OVERFLOW for flow in each.sends))

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        found = super().config(case, context)
        choices = {"enabled": True, "check_grad_overflow": False, "immediate_grad_update": True}
        types = {"param_dtype": "bf16", "buffer_dtype": "fp32", "keep_in_fp32_modules": ["*"]}
        return {**found, "bf16": choices, "data_types": {**found["data_types"], **types}}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where stage 1 does not add gradients up as they come: nothing measured need show it."""
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        if keeps_whole_gradients(case) and not engine.zero._grad_acc_hooks:
            raise AdapterError(f"rank {context.rank}: DeepSpeed does not heed immediate_grad_update")
        return engine


class ReplicatedBF16Engine(ReplicatedEngine):
    """`module.optimizer` is DeepSpeed's `FP16_UnfusedOptimizer`, which holds a float32 master of each weight."""

    def _masters(self) -> dict[Tensor, Tensor]:
        pairs = zip(self.zero.fp16_groups, self.zero.fp32_groups, strict=True)
        return {weight: master for weights, masters in pairs for weight, master in zip(weights, masters, strict=True)}

    def parameters(self) -> Mapping[str, Tensor]:
        found = self._masters()
        return {name: found[weight].detach() for name, weight in self.named_parameters()}

    def holdings(self) -> Holdings:
        held = DataParallelEngine.holdings(self)
        masters = [master.detach() for master in self._masters().values()]
        return dataclasses.replace(held, parameters=[*held.parameters, *masters])

    @torch.no_grad()
    def restore_masters(self) -> None:
        """Take back the update that DeepSpeed makes with gradients of zero when it is set up, which decays masters and
        counts as the first (adapters/gaps/deepspeed_unfused_first_step.py). Masters get their initial values."""
        for state in self.optimizer.state.values():
            state["step"].zero_()
        found, workload = self._masters(), self.case.workload
        for name, weight in self.named_parameters():
            found[weight].copy_(
                initial_value(workload.model, name, weight.shape, seed=workload.seed, device=weight.device)
            )


class DeepSpeedZero0BF16(DeepSpeedZero0):
    """bf16 without ZeRO: weights and gradients are bf16, summed over ranks in bf16; masters are float32."""

    engine: ClassVar = ReplicatedBF16Engine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedZero0.capabilities,
        precisions=frozenset({Precision.BF16_REDUCE_BF16}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Precision.FP32: "its optimizer is of bf16",
            Precision.BF16: "without ZeRO it accumulates and reduces gradients in bf16",
            Feature.UNFREEZE: "it keeps frozen parameters in 16 bits",
            Feature.RESHARD: "universal checkpoints are ZeRO's",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Gradients are copied to float32 for the update alone, when activations are gone."""
        using = eager_recipe(case, "eager-deepspeed-0", casts_weights=True)
        states = dataclasses.replace(using.states, weight_bytes=2, gradient_bytes=2, master_bytes=4)
        return dataclasses.replace(using, states=states, peak_known=False)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return ()

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.num_micro_batches > 1:
            return (
                f"{case.adapter} does not support several micro-batches (without ZeRO it sums their gradients in bf16)"
            )
        return super().supports(case, device, backend)

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        narrow = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
        return {**super().config(case, context), **narrow}
