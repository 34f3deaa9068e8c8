"""DeepSpeed's own Muon under ZeRO stage 3, which orthogonalizes whole matrices before each rank updates its part."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import nn

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, Holdings, RankContext
from meshmark.adapters.deepspeed import STAGE_3_GAPS, DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.errors import AdapterError
from meshmark.models.module import parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory


class MuonEngine(DeepSpeedEngine):
    """Buffers in which matrices come together stay."""

    def holdings(self) -> Holdings:
        held = super().holdings()
        kept = [tensor for buffers in self.zero._muon_allgather_buffers.values() for tensor in buffers[:2]]
        return dataclasses.replace(held, communication=[*held.communication, *kept])


class DeepSpeedMuon(DeepSpeed):
    """`save_muon_momentum_buffer_in_memory`: momentum is in a buffer of the engine's.

    DeepSpeed scales an update by the root of rows over columns, where PyTorch matches the size of AdamW's updates: each
    shape has a rate of its own, by which its weight decay is divided.
    """

    engine: ClassVar = MuonEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        zero_stages=frozenset({3}),
        precisions=frozenset({Precision.FP32}),
        lacks={
            **{k: v for k, v in DeepSpeed.capabilities.lacks.items() if k is not Feature.MATRIX_WISE},
            Precision.BF16: "not tried",
            Precision.FP16: "not tried",
            Feature.RESHARD: "not tried",
            Feature.UNUSED: "a matrix without a gradient is given one of zero",
        },
    )
    known_gaps: ClassVar = STAGE_3_GAPS

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        spec = case.workload.optimizer
        if spec.kind is not OptimizerKind.MUON or not spec.nesterov:
            return f"{case.adapter} takes Muon with Nesterov's momentum alone"
        if spec.clip_norm is not None:
            return f"{case.adapter} does not support clipping (DeepSpeed takes the norm of Muon's updates)"
        return super().supports(case, device, backend)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Of every size of a rank's part of a group of matrices, that part and the whole stay in two buffers."""
        spec, dp, parts = case.workload.optimizer, case.layout.dp, dict[tuple[float, bool], int]()
        for name, shape in parameter_shapes(case.workload.model).items():
            if spec.orthogonalizes(name, tuple(shape)):
                key = _muon_group(spec, tuple(shape))["lr"], spec.decays(name)
                parts[key] = parts.get(key, 0) + math.ceil(math.prod(shape) / dp)
        num_bytes = 4.0 * (1 + dp) * sum({*parts.values()}) if dp > 1 else 0.0
        reason = "buffers in which matrices come together stay (`_muon_allgather_buffers`)"
        return (*super().extra_memory(case, rank), ExtraMemory(category="steady", num_bytes=num_bytes, reason=reason))

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """Which rank orthogonalizes which matrix, and tells the others, is in no closed form of Meshmark's."""
        return False

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        choices = {"reduce_scatter": False, "save_muon_momentum_buffer_in_memory": True}
        return {**super().zero_options(case, context), **choices}

    def optimizer(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        spec, groups = case.workload.optimizer, dict[tuple[Any, ...], dict[str, Any]]()
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            by_muon = spec.orthogonalizes(name, shape)
            parameter.use_muon = by_muon  # type: ignore[attr-defined]
            group = _muon_group(spec, shape) if by_muon else _adam_group(spec)
            decay = group["weight_decay"] * spec.decays(name)
            key = (by_muon, group["lr"], decay)
            groups.setdefault(key, {**group, "weight_decay": decay, "params": []})["params"].append(parameter)
        made: torch.optim.Optimizer = MuonWithAuxAdam([*groups.values()])
        return made

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where DeepSpeed keeps momentum elsewhere, which what is measured would not show."""
        import torch._dynamo.config

        torch._dynamo.config.disable = True  # Muon's functions would be compiled at their first call, for minutes
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        if not (engine.zero.use_muon and engine.zero.save_muon_momentum_buffer_in_memory):
            raise AdapterError(f"rank {context.rank}: DeepSpeed does not keep Muon's momentum in memory")
        return engine


def _muon_group(spec: OptimizerSpec, shape: tuple[int, ...]) -> dict[str, Any]:
    rows, columns = shape
    scale = 0.2 * math.sqrt(max(shape)) / math.sqrt(max(1.0, rows / columns))
    return {
        "use_muon": True,
        "lr": spec.learning_rate * scale,
        "weight_decay": spec.weight_decay / scale,
        "momentum": spec.momentum,
    }


def _adam_group(spec: OptimizerSpec) -> dict[str, Any]:
    return {
        "use_muon": False,
        "lr": spec.learning_rate,
        "weight_decay": spec.weight_decay,
        "betas": spec.betas,
        "eps": spec.eps,
    }
