"""`make dry-runs`: theory at 1,024 and 16,384 ranks beside dry runs of every layout family that
fake worlds can run, in reports/dry-runs.md; ends with 1 where they differ.

    python -m studies.dry_runs --worlds 16384 --only tp-fsdp2
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshmark.adapter.registry import builtin_adapters
from meshmark.environment import describe
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.transformer import gpt
from meshmark.report.kept_page import keep_page
from meshmark.report.table import table_of
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload
from studies.dry_run import DryRun, dry_run

REPORT = Path(__file__).parents[1] / "reports" / "dry-runs.md"
WORLDS = (1024, 16384)
_OPTIONS = RunOptions(time_limit_seconds=600)
_INTRO = """Single ranks of a world of thousands run their adapter's real engine, each alone, over
collectives that are over at once, as suites/test_scale.py has it; the suites' meters read them and the suites' rules
judge them: traffic to the byte, by kind and group; states, activations and what is there between two steps within 1 %.
Peaks are none of this page's: thousands of shards of so small a model are mostly padding, which no peak is planned
with; over 16,384 shards alone a rank's step takes gigabytes for it. Each world is seen from its first and its last
rank, and a pipeline from its middle too.
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


def cases(worlds: Sequence[int], only: str) -> Iterator[Case]:
    for world in worlds:
        for family in FAMILIES:
            if only in family.adapter and world in family.worlds:
                yield family.case(world)


def table(found: Sequence[DryRun]) -> str:
    return table_of(
        [
            ("adapter", [run.case.adapter for run in found]),
            ("layout", [run.case.layout.id for run in found]),
            ("ranks", [f"{run.case.world_size:,}" for run in found]),
            ("seen from", [", ".join(f"{rank:,}" for rank in run.ranks) for run in found]),
            ("traffic", [run.traffic for run in found]),
            ("largest error of states and activations", [run.memory for run in found]),
            ("seconds", [f"{run.seconds:.1f}" for run in found]),
        ],
        keys=3,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--only", default="", help="part of an adapter's name")
    parser.add_argument("-o", "--output", type=Path, help=f"the report; reports/{REPORT.name} of a whole run")
    given = parser.parse_args()
    worlds = [int(world) for world in given.worlds.split(",")]
    found, here = [], describe("cpu", "gloo", 1)
    with (
        Cluster(ClusterSpec()) as cluster,
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(ForkserverLauncher(cluster)) as launcher,
        contextlib.closing(Runner(launcher, builtin_adapters(), _OPTIONS, Path(folder))) as runner,
    ):
        for case in cases(worlds, given.only):
            found.append(dry_run(runner, case))
            print(f"{case.id}: {', '.join(found[-1].failures) or 'agrees'}", file=sys.stderr, flush=True)
    text = table(found)
    print(text)
    whole = not given.only and tuple(worlds) == WORLDS
    if output := given.output or (REPORT if whole else None):
        made = f"Made by `make dry-runs` at commit {here.commit} on {here.machine}, {here.date}."
        keep_page(f"# Dry runs\n\n{made} {_INTRO}\n{text}\n", output)
    wrong = [f"{run.case.id}: {why}" for run in found for why in run.failures]
    print("\n".join(wrong))
    return int(bool(wrong) or not found)


if __name__ == "__main__":
    sys.exit(main())
