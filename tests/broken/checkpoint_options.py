"""Defects of adapters that vary how checkpoints are written and read, which the clause `resume` must catch."""

from __future__ import annotations

from pathlib import Path

import torch

from meshmark.judge.faults import Fault
from meshmark.spec.layout import Layout, Offload
from tests.broken import resume as c
from tests.broken import wrapped as w
from tests.broken.engine import Broken
from tests.broken.mutant import Mutant, against, on

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


CHECKPOINT_OPTION_MUTANTS: list[Mutant] = [
    *against("resume", "deepspeed-elastic", c.FirstShardForAll, F.UPDATE, layout=SHARDED),
    *against("resume", "deepspeed-universal", c.MixesShards, layout=SHARDED),
    *against("resume", "deepspeed-universal", c.ForgetsCount, F.UPDATE, layout=PARTED),
    *against(
        "resume",
        "fsdp2-whole-checkpoint fairscale-fsdp-first-rank",
        OnlyTheFirstRankLoads,
        F.NEVER_UPDATED,
        F.UPDATE,
        layout=SHARDED,
    ),
    *against("resume", "fsdp2-converted-checkpoint", c.SavesStaleWeights, F.NEVER_UPDATED, layout=SHARDED),
    *against("resume", "fabric-tp-fsdp2-whole-checkpoint", c.FirstShardForAll, F.UPDATE, layout=CROSSED),
    *against("resume", "fairscale-fsdp-shard-files", ReadsTheNextRanksShards, layout=SHARDED),
    *on("fabric-deepspeed-offloads", w.HookedScale, F.SCALED, layout=OFFLOADED),
]
