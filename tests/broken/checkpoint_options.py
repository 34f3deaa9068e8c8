"""Defects of adapters that vary how checkpoints are written and read, which the clause `resume` must catch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from meshmark.adapter.contract import Adapter
from meshmark.conformance.scenario import plain_workload
from meshmark.judge.faults import Fault
from meshmark.spec.layout import Layout, Offload
from tests.broken import resume as c
from tests.broken import wrapped as w
from tests.broken.engine import Broken
from tests.broken.mutant import Mutant, on

F = Fault
SHARDED, PARTED = Layout(dp=2, zero_stage=3), Layout(dp=2, zero_stage=2)
CROSSED = Layout(dp=2, tp=2, zero_stage=3)
OFFLOADED = Layout(dp=2, zero_stage=3, num_micro_batches=4, offload=Offload.CPU)


class OnlyTheFirstRankLoads(Broken):
    """The first rank reads the weights, and does not send the others theirs."""

    def load(self, folder: Path) -> None:
        start = [parameter.clone() for parameter in self.locals()]
        super().load(folder)
        if self.context.rank > 0:
            self.put(start)


class ReadsTheNextRanksShards(Broken):
    """Files of shards are counted from another rank than the one that wrote them."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        files = sorted(folder.glob("shards-*.pt"))
        if self.context.rank == 0:
            contents = [file.read_bytes() for file in files]
            for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
                file.write_bytes(content)
        torch.distributed.barrier()


def _resuming(
    adapters: str, defect: type[Broken] | type[Adapter], *faults: Fault, layout: Layout = SHARDED
) -> Iterator[Mutant]:
    for adapter in adapters.split():
        yield Mutant(
            adapter=adapter,
            defect=defect,
            clause="resume",
            faults=frozenset(faults),
            workload=plain_workload(),
            layout=layout,
        )


CHECKPOINT_OPTION_MUTANTS: list[Mutant] = [
    *_resuming("deepspeed-elastic", c.FirstShardForAll, F.UPDATE),
    *_resuming("deepspeed-universal", c.MixesShards),
    *_resuming("deepspeed-universal", c.ForgetsCount, F.UPDATE, layout=PARTED),
    *_resuming("fsdp2-whole-checkpoint fairscale-fsdp-first-rank", OnlyTheFirstRankLoads, F.NEVER_UPDATED, F.UPDATE),
    *_resuming("fsdp2-converted-checkpoint", c.SavesStaleWeights, F.NEVER_UPDATED),
    *_resuming("fabric-tp-fsdp2-whole-checkpoint", c.FirstShardForAll, F.UPDATE, layout=CROSSED),
    *_resuming("fairscale-fsdp-shard-files", ReadsTheNextRanksShards),
    *on("fabric-deepspeed-offloads", w.HookedScale, F.SCALED, layout=OFFLOADED),
]
