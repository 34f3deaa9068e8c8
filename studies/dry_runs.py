"""`make dry-runs`: theory at 1,024 and 16,384 ranks beside dry runs of every layout family that PyTorch's fake process
group can run, in reports/dry-runs.md; ends with 1 where they differ.

    python -m studies.dry_runs --worlds 16384 --only tp-fsdp2
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from meshmark.adapter.registry import builtin_adapters
from meshmark.report.markdown import table_of
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.model_spec import gpt
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload
from studies.dry_run import DryRun, dry_run

REPORT = Path(__file__).parents[1] / "reports" / "dry-runs.md"
WORLDS = (1024, 16384)
_PRELOAD = ("fsdp", "tensor.parallel", "pipelining", "optim")
_INTRO = """# Dry runs

Made by `make dry-runs`. One rank of a world of thousands runs its adapter's real engine over PyTorch's fake process
group, which answers every collective without a peer; the suites' meters read it and the suites' rules judge it: traffic
to the byte, by kind and group; states, activations and what is there between two steps within 1 %. Peaks are none of
this page's: a group that moves nothing holds no buffers, and thousands of shards of so small a model are mostly
padding, which no peak is planned with; over 16,384 shards alone a rank's step takes gigabytes for it. Each world is
seen from its first and from its last rank.
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A way to lay a model over any number of ranks."""

    adapter: str
    layout: Layout
    """Its dp is what the world leaves."""
    hidden: int = 64
    layers: int = 1
    vocab_size: int = 256
    worlds: tuple[int, ...] = WORLDS

    def case(self, world: int) -> Case:
        layout = replace(self.layout, dp=world // (self.layout.world_size))
        model = gpt("dry", self.layers, self.hidden, 16, vocab_size=self.vocab_size, seq_len=64)
        optimizer, batch = OptimizerSpec(clip_norm=0.5), layout.dp * layout.num_micro_batches
        workload = Workload(name="dry", model=model, global_batch=batch, masked=False, optimizer=optimizer)
        return Case(adapter=self.adapter, workload=workload, layout=layout)


_LINE = Layout(pp=16, num_micro_batches=16, schedule=Schedule.ONE_F_ONE_B)
_LOOPED = Layout(pp=8, num_micro_batches=8, schedule=Schedule.INTERLEAVED, virtual_stages=2)
FAMILIES = (
    Family(adapter="ddp", layout=Layout(num_micro_batches=2)),
    Family(adapter="ddp-zero1", layout=Layout(zero_stage=1)),
    Family(adapter="fsdp2", layout=Layout(zero_stage=3, num_micro_batches=2), worlds=(1024,)),
    Family(adapter="fsdp2-hsdp", layout=Layout(zero_stage=3), worlds=(1024,)),
    Family(adapter="tp", layout=Layout(tp=8, num_micro_batches=2)),
    Family(adapter="tp-fsdp2", layout=Layout(tp=8, zero_stage=3, num_micro_batches=2), hidden=256),
    Family(adapter="pipeline", layout=_LINE, layers=16),
    Family(adapter="pipeline", layout=_LOOPED, layers=16),
    Family(adapter="pipeline-tp", layout=replace(_LINE, tp=8), layers=16),
    # Rows of every part of a tensor for every one of 64 shards: theory knows no padding of three axes.
    Family(
        adapter="pipeline-fsdp2",
        layout=replace(_LINE, tp=16, zero_stage=3),
        layers=16,
        hidden=1024,
        vocab_size=1024,
    ),
)


def runs(worlds: Sequence[int], only: str) -> Iterator[tuple[Case, int]]:
    for world in worlds:
        for family in FAMILIES:
            if only in family.adapter and world in family.worlds:
                yield from ((family.case(world), rank) for rank in (0, world - 1))


def _apart(case: Case, rank: int) -> DryRun:
    """In a process of its own: PyTorch keeps meshes of groups that are gone."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(case, rank, there))
    process.start()
    there.close()
    try:
        run: DryRun = here.recv()
    except EOFError:
        process.join()
        raise SystemExit(f"{case.id} on rank {rank} ended with {process.exitcode}") from None
    process.join()
    return run


def _run(case: Case, rank: int, there: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    there.send(dry_run(case, builtin_adapters()[case.adapter], rank))


def table(found: Sequence[DryRun]) -> str:
    return table_of(
        [
            ("adapter", [run.case.adapter for run in found]),
            ("layout", [run.case.layout.id for run in found]),
            ("ranks", [f"{run.case.world_size:,}" for run in found]),
            ("rank", [f"{run.rank:,}" for run in found]),
            ("traffic", [run.traffic for run in found]),
            ("largest error of states and activations", [run.memory for run in found]),
            ("seconds", [f"{run.seconds:.1f}" for run in found]),
        ],
        keys=4,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--only", default="", help="part of an adapter's name")
    parser.add_argument("-o", "--output", type=Path, help=f"the report; reports/{REPORT.name} of a whole run")
    given = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    for name in _PRELOAD:
        importlib.import_module(f"torch.distributed.{name}")
    worlds = [int(world) for world in given.worlds.split(",")]
    found = []
    for case, rank in runs(worlds, given.only):
        run = _apart(case, rank)
        print(f"{case.id} on rank {rank:,}: {', '.join(run.failures) or 'agrees'}", file=sys.stderr, flush=True)
        found.append(run)
    text = table(found)
    print(text)
    whole = not given.only and tuple(worlds) == WORLDS
    if output := given.output or (REPORT if whole else None):
        output.write_text(f"{_INTRO}\n{text}\n")
    wrong = [f"{run.case.id} on rank {run.rank}: {why}" for run in found for why in run.failures]
    print("\n".join(wrong))
    return int(bool(wrong) or not found)


if __name__ == "__main__":
    sys.exit(main())
