"""Decentralised training over point-to-point calls of `torch.distributed`: replicas that tell their neighbours in a
graph alone. Ours, for no kept library does it: BlueFog's neighbour all-reduce hangs (docs/systems.md)."""

from __future__ import annotations

from typing import ClassVar

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapters.decentralised.memory import held_besides
from meshmark.algorithms import decentralised
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory


class Decentralised(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        algorithms=frozenset(one.kind for one in decentralised.ALGORITHMS),
        lacks={
            Precision.BF16_REDUCE_BF16: "states are mixed in the precision that they are kept in",
            Precision.FP16: "a replica that skips an overflowing step would mix states of another step in",
            Feature.UNUSED: "what is tracked of a parameter that a step leaves out is not specified",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.RESHARD: "the replicas of another world size are other ones",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if reason := super().supports(case, device, backend):
            return reason
        if (device, backend) == ("cuda", "gloo") and case.layout.dp > 1:
            return f"{case.adapter} does not support CUDA tensors over gloo (its send and recv take host memory alone)"
        misfit = case.workload.algorithm_as(decentralised.Decentralised).graph.refusal(case.layout.dp)
        return f"{case.adapter} does not support {misfit}" if misfit else None

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return held_besides(case, rank, cls.recipe(case))

    def build(self, case: Case, context: RankContext) -> Engine:
        from meshmark.adapters.decentralised.engines import ENGINES

        module, algorithm = initial_model(case, context.device), case.workload.algorithm
        optimizer = build_optimizer(algorithm.local_optimizer(case.workload.optimizer), module.named_parameters())
        return ENGINES[algorithm.kind](case, context, module, optimizer)
