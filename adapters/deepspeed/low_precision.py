"""DeepSpeed's further choices in bf16: how gradients get into float32, whether they are searched for overflows, and no ZeRO
at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.capabilities import Feature
from meshmark.adapter.data_parallel import DataParallelEngine
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.holdings import Holdings
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.replicated import DeepSpeedZero0, ReplicatedEngine
from meshmark.adapters.deepspeed.traffic_exceptions import keeps_whole_gradients
from meshmark.errors import AdapterError
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.flow import Purpose, TrafficException


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
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        found = super().traffic_exceptions(case, rank)
        return tuple(each for each in found if not any(flow.purpose is Purpose.OVERFLOW for flow in each.sends))

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        found = super().config(case, context)
        choices = {"enabled": True, "check_grad_overflow": False, "immediate_grad_update": True}
        types = {"param_dtype": "bf16", "buffer_dtype": "fp32", "keep_in_fp32_modules": ["*"]}
        return {**found, "bf16": choices, "data_types": {**found["data_types"], **types}}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where stage 1 adds no gradients up as they come, which what is measured need not show."""
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
        from meshmark.reference.initial import initial_value

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
            Feature.RESHARD: "universal checkpoints are ZeRO's",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.num_micro_batches > 1:
            return (
                f"{case.adapter} does not support several micro-batches (without ZeRO it sums their gradients in bf16)"
            )
        return super().supports(case, device, backend)

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        narrow = {"communication_data_type": "bfp16", "data_types": {"grad_accum_dtype": "bf16"}}
        return {**super().config(case, context), **narrow}
