"""Data parallelism that sends less than gradients, over collectives of `torch.distributed`. Ours, for no kept library
does it on CPU: PyTorch's own hooks are `ddp-compressed`."""

from __future__ import annotations

from typing import ClassVar

from meshmark.adapter.arithmetic import Arithmetic, Casting
from meshmark.adapter.capabilities import Capabilities, Feature
from meshmark.adapter.contract import Adapter
from meshmark.adapter.data_parallel import initial_model
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.compressed.memory import held_besides
from meshmark.algorithms.table import local_optimizer
from meshmark.reference.objective import build_optimizer
from meshmark.spec.algorithm import COMPRESSING
from meshmark.spec.case import Case
from meshmark.spec.compressor import SPARSE, CompressorKind
from meshmark.spec.precision import Precision
from meshmark.theory.states import Remainder


class Compressed(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        algorithms=COMPRESSING,
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
    def remainders(cls, case: Case, rank: int) -> tuple[Remainder, ...]:
        return held_besides(case, rank, cls.recipe(case))

    def build(self, case: Case, context: RankContext) -> Engine:
        from meshmark.adapters.compressed.table import ENGINES

        module = initial_model(case, context.device)
        optimizer = build_optimizer(local_optimizer(case.workload), module.named_parameters())
        return ENGINES[case.workload.algorithm.kind](case, context, module, optimizer)
