"""Defects of the roster's adapters, which `make roster` applies: choices that are not followed, and of the engines that
the core has not got, what goes wrong there alone."""

from __future__ import annotations

from collections.abc import Iterator

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.fsdp1 import FSDP1
from meshmark.adapters.fsdp2 import FSDP2
from meshmark.judge.faults import Fault
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.theory.sharding import Sharding
from tests.broken import gradients as g
from tests.broken.engine import Broken
from tests.broken.mutant import GPT, Mutant

F = Fault
TWO, FOUR = (Layout(dp=dp, zero_stage=3, num_micro_batches=4) for dp in (2, 4))


class ShardsPlainly(Adapter):
    """FSDP2, whatever was chosen: all weights are given up after every forward pass, in one replica."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return FSDP2().build(case, context)


class KeepsWeights(Adapter):
    """FSDP2, and no weights are given up before the backward pass is over."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Keeping(FSDP2):
            sharding = Sharding(reshards_blocks=False, reshards_root=False)

        return Keeping().build(case, context)


class FullShard(Adapter):
    """FSDP1, whatever strategy was chosen."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return FSDP1().build(case, context)


class ReplicasNotReduced(Broken):
    """HSDP reduces within a replica alone."""

    def prepare(self) -> None:
        self.root().set_requires_all_reduce(False)  # type: ignore[operator]


def _on(
    adapters: str, defect: type[Broken] | type[Adapter], *faults: Fault, suite: str = "equivalence", layout: Layout
) -> Iterator[Mutant]:
    for adapter in adapters.split():
        yield Mutant(adapter=adapter, defect=defect, suite=suite, faults=frozenset(faults), workload=GPT, layout=layout)


ROSTER_MUTANTS: list[Mutant] = [
    *_on("fsdp2-noreshard fsdp2-recommended", ShardsPlainly, suite="communication", layout=TWO),
    *_on("fsdp2-hsdp fsdp2-reshard2", ShardsPlainly, suite="communication", layout=FOUR),
    *_on("fsdp2-recommended", KeepsWeights, suite="communication", layout=TWO),
    *_on("fsdp2-hsdp", ReplicasNotReduced, F.NOT_REDUCED, layout=FOUR),
    *_on("fsdp1-shard-grad-op", FullShard, suite="communication", layout=TWO),
    *_on("fsdp1-hybrid", FullShard, suite="communication", layout=FOUR),
    *_on("fsdp1 fsdp1-shard-grad-op", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("fsdp1-hybrid", g.AveragedTwice, F.SCALED, layout=FOUR),
    *_on("fsdp1", g.MeanOfRanks, F.UNEVEN, layout=TWO),
    *_on("fsdp1", g.DropsLast, F.DROPPED, layout=TWO),
]
