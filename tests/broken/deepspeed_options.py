"""Defects of adapters that vary DeepSpeed's options: the option is not heeded, or what follows from it is not done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import SequentialSampler

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed.experts import DeepSpeedExperts
from meshmark.adapters.deepspeed.loader import CurriculumLoop, DeepSpeedLoop, DeepSpeedLoopEngine
from meshmark.adapters.deepspeed.ulysses import DeepSpeedUlysses
from meshmark.judge.faults import Fault
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.broken.engine import Broken
from tests.broken.mutant import MIXTURE, Mutant, on

F = Fault
SHARED = Layout(cp=2, zero_stage=3, num_micro_batches=4)
PARTED = Layout(dp=2, zero_stage=2, num_micro_batches=4)
SHARDED = Layout(dp=2, zero_stage=3, num_micro_batches=4)
MUON = replace(
    workload("gpt-mini-muon"),
    name="llama-mini-muon-unclipped",
    model=workload("llama-mini").model,
    optimizer=replace(workload("gpt-mini-muon").optimizer, clip_norm=None),
)
FOUR = Layout(dp=4, zero_stage=2, num_micro_batches=2)


class SendsWide(Adapter):
    """Gradients are sent in float32, though bf16 was asked for."""

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return DeepSpeedUlysses().config(case, context)


class ExpertsOfNeighbours(Adapter):
    """Neighbours are given different experts, though DeepSpeed takes them for the same."""

    @classmethod
    def stands(cls, case: Case, replica: int) -> tuple[int, int]:
        return DeepSpeedExperts.stands(case, replica)


class EveryRankReadsAll(Adapter):
    """DeepSpeed is given a sampler that deals no rows, which every rank reads in order."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Same(DeepSpeedLoop):
            def loader(self) -> Any:  # noqa: ANN401
                rows = SequentialSampler(self.rows)
                return self.engine.deepspeed_io(self.rows, data_sampler=rows, num_local_io_workers=0)

        return DeepSpeedLoopEngine(case, context, Same(case, context, self.config(case, context)))  # type: ignore[attr-defined]


class ShorterSequences(Adapter):
    """The curriculum begins with shorter sequences than the workload's."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Shorter(CurriculumLoop):
            def length(self, step: int) -> int:
                return super().length(step) - 8 * (step == 1)

        return DeepSpeedLoopEngine(case, context, Shorter(case, context, self.config(case, context)))  # type: ignore[attr-defined]


class MomentumStartsAnew(Broken):
    """The buffer of momentum is emptied before every update."""

    def update(self) -> Tensor | None:
        for momentum in self.zero.muon_momentum_buffer_partitioned_groups_flat.values():  # type: ignore[attr-defined]
            momentum.zero_()
        return super().update()  # type: ignore[safe-super]


DEEPSPEED_OPTION_MUTANTS: list[Mutant] = [
    *on(
        "deepspeed-ulysses-narrow",
        SendsWide,
        suite="communication",
        layout=SHARED,
        precision=Precision.BF16_REDUCE_BF16,
    ),
    *on("deepspeed-muon", MomentumStartsAnew, F.UPDATE, layout=SHARDED, workload=MUON),
    *on("deepspeed-loader", EveryRankReadsAll, layout=PARTED),
    *on("deepspeed-curriculum", ShorterSequences, layout=PARTED),
    *on("deepspeed-experts-data-first", ExpertsOfNeighbours, F.START, layout=FOUR, workload=MIXTURE),
]
