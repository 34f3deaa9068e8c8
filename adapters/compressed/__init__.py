"""Data parallelism with compressed gradients, over collectives of `torch.distributed`.

These engines are Meshmark's own, because no maintained library runs on a CPU. PyTorch's hooks are `ddp-compressed`.
"""

from __future__ import annotations

from typing import ClassVar

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapters.compressed.memory import held_besides
from meshmark.algorithms import compressed, one_bit
from meshmark.algorithms.compressed.compressor import SPARSE, CompressorKind
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory


class Compressed(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=TEXT_FAMILIES | {Family.OWN},
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        algorithms=frozenset(one.kind for one in (*compressed.ALGORITHMS, *one_bit.ALGORITHMS)),
        compressors=SPARSE | {CompressorKind.SIGN, CompressorKind.QSGD},
        lacks={
            Precision.BF16_REDUCE_BF16: "what is sent has a format of its own",
            Precision.FP16: "a replica that skips an overflowing step would send what others do not",
            Feature.UNUSED: "what is left of a parameter that a step leaves out is not specified",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.RESHARD: "what each replica has yet to send is its own",
        },
    )

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return held_besides(case, rank, cls.recipe(case))

    def build(self, case: Case, context: RankContext) -> Engine:
        from meshmark.adapters.compressed.table import ENGINES

        module, algorithm = initial_model(case, context.device), case.workload.algorithm
        optimizer = build_optimizer(algorithm.local_optimizer(case.workload.optimizer), module.named_parameters())
        return ENGINES[algorithm.kind](case, context, module, optimizer)
