"""FairScale's OSS under PyTorch's DistributedDataParallel: ZeRO's stage 1, as its documentation has it first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, Holdings, RankContext, optimizer_state_tensors
from meshmark.adapters.ddp import DDPEngine
from meshmark.adapters.fairscale import FairScaleOSS
from meshmark.adapters.zero_redundancy import DDPZero1
from meshmark.reference.objective import parameter_groups, reference_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.traffic import Purpose, TrafficException, by, exceptions_for, step_traffic


class OSSUnderDDPEngine(DDPEngine):
    optimizer: Any

    def clip(self, max_norm: float) -> Tensor:
        """OSS takes the norm of what each rank owns, and sums."""
        norm: Tensor = self.optimizer.clip_grad_norm(max_norm)
        return norm

    def holdings(self) -> Holdings:
        parameters = list(self.module.parameters())
        return Holdings(
            parameters=[p.detach() for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer_states=optimizer_state_tensors(self.optimizer.optim),
        )

    def save(self, folder: Path) -> None:
        self.optimizer.consolidate_state_dict(recipient_rank=0)
        super().save(folder)


class FairScaleOSSDDP(DDPZero1):
    preload: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar = FairScaleOSS.requires
    capabilities: ClassVar = replace(
        FairScaleOSS.capabilities,
        zero_stages=frozenset({1}),
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={
            Precision.FP64: "OSS computes the gradient norm in float32",
            Precision.FP16: "FairScale's ShardedGradScaler is one of CUDA, and switches itself off without",
            Precision.BF16_REDUCE_BF16: "gradients are reduced as DDP holds them, in float32",
            Feature.MATRIX_WISE: "its shares are planned for states of the parameters' shapes",
        },
    )

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """OSS gives tensors away as under ShardedDataParallel; gradients are DDP's, whole."""
        return tuple(r for r in FairScaleOSS.extra_memory(case, rank) if r.category == "optimizer_states")

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        flows = step_traffic(case, rank)
        return (
            *exceptions_for(flows, Purpose.GRADIENTS, "DDP gives every rank the whole gradient", by("all_reduce")),
            *exceptions_for(flows, Purpose.WEIGHTS, "owners broadcast what they have updated", by("broadcast")),
        )

    def build(self, case: Case, context: RankContext) -> Engine:
        from fairscale.optim import OSS

        module, spec = self.wrap(case, context), case.workload.optimizer
        kind, arguments = reference_optimizer(spec).arguments()
        optimizer = OSS(parameter_groups(spec, module.module.named_parameters()), optim=kind, **arguments)
        return OSSUnderDDPEngine(case, context, module, optimizer)
