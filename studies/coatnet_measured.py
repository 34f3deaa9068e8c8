"""A CoAtNet under PyTorch's own ways of laying it over ranks, measured on this machine: what the fullest rank holds and
the busiest one sends, which are exact, and on as many ranks as there are cores how fast it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.quiet import Quiet
from meshmark.adapter.registry import builtin_adapters
from meshmark.judge.deviation import Assess
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.record import Record, Status
from meshmark.records.record_file import read_records
from meshmark.run.resume import KeptRecords
from meshmark.run.runner import Runner, RunOptions
from meshmark.run.throughput import Throughput, throughput
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Schedule
from meshmark.spec.workload import Workload, workload
from studies.coatnet_planned import net

WIDTHS = (32, 64, 128)
WORLDS = (2, 4, 8)
TIMED = 2
"""Ranks that are timed: on more than there are cores they wait for one another's turn."""
PATIENCE_SECONDS = 60.0
"""How long to wait, in all, for a quiet machine before something is timed."""


def work(width: int) -> Workload:
    """Eight blocks on the digits."""
    model = net(width, 2, image_size=8, num_channels=1, num_classes=10)
    return replace(workload("coatnet-digits"), name=model.name, model=model)


def cases(width: int, world: int) -> dict[str, Case]:
    """By what they are called, the simplest first."""
    pipeline = Layout(pp=world, schedule=Schedule.ONE_F_ONE_B, num_micro_batches=max(4, world))
    asked = {
        "data parallel": ("ddp", Layout(dp=world)),
        "ZeRO-1": ("ddp-zero1", Layout(dp=world, zero_stage=1)),
        "ZeRO-2": ("fsdp2-noreshard", Layout(dp=world, zero_stage=3)),  # its layout shards at rest
        "ZeRO-3": ("fsdp2", Layout(dp=world, zero_stage=3)),
        "ZeRO-3, offloaded": ("fsdp2-offload", Layout(dp=world, zero_stage=3, offload=Offload.CPU)),
        f"pipeline of {world}": ("pipeline", pipeline),
    }
    if world > 2:
        asked["pipeline of 2"] = ("pipeline", replace(pipeline, pp=2, dp=world // 2, num_micro_batches=4))
    return {
        name: Case(adapter=adapter, workload=work(width), layout=layout) for name, (adapter, layout) in asked.items()
    }


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one layout of one size."""

    name: str
    observed: Record
    timed: Record | None = None

    @property
    def case(self) -> Case:
        return self.observed.case

    @property
    def width(self) -> int:
        return self.case.workload.model.layers[0].normed[0]  # type: ignore[union-attr]

    @property
    def failure(self) -> str | None:
        """Why there are no numbers."""
        wrong = [r for r in (self.observed, self.timed) if r and r.outcome.status is not Status.OK]
        return f"{wrong[0].task}: {wrong[0].outcome.status}: {wrong[0].outcome.message}" if wrong else None

    @property
    def peaks(self) -> list[int]:
        """By rank, of all tensors at the fullest instant of a step."""
        return [reading.peak.total for reading in self.observed.memory.readings]

    @property
    def host_bytes(self) -> list[float]:
        """By rank, as planned: weights and moments that are offloaded, which are there all through a step. On a CPU
        they lie in the same memory as all else."""
        return [p.host_parameters + p.host_optimizer_states if p else 0.0 for p in self.observed.memory.planned]

    @property
    def device_bytes(self) -> float:
        """Return the bytes of the fullest rank, without what is offloaded."""
        return max(peak - host for peak, host in zip(self.peaks, self.host_bytes, strict=True))

    @property
    def sent_bytes(self) -> float:
        """In a step, by the busiest rank."""
        return max(sum(each.wire_bytes for each in rank.asked) for rank in self.observed.traffic.readings)

    @property
    def as_planned(self) -> bool | None:
        """Whether states are what the closed form says, within the suites' 1 %."""
        verdict = self.observed.verdict("memory")
        return verdict.passed if verdict else None

    @property
    def rate(self) -> Throughput | None:
        return throughput(self.timed) if self.timed and self.timed.timing.rank_step_seconds else None


def fitting(found: Sequence[Measured], budget: float) -> list[Measured]:
    return [each for each in found if not each.failure and each.device_bytes <= budget]


def fastest(found: Sequence[Measured]) -> list[Measured]:
    """And those that cannot be told from it, for their intervals meet; the simplest first, as `found` has them."""
    rated = [(each, rate) for each in found if (rate := each.rate)]
    if not rated:
        return []
    first = max((rate for _, rate in rated), key=lambda rate: rate.per_second)
    return [each for each, rate in rated if rate.ties(first)]


def frugal(found: Sequence[Measured]) -> Measured | None:
    """Which sends least."""
    return min(found, key=lambda each: each.sent_bytes, default=None)


@contextlib.contextmanager
def running(results: Path, options: RunOptions) -> Iterator[Runner]:
    """A runner that goes on where one was ended, on the same commit without changes."""
    held = KeptRecords(read_records(results, latest=True).records) if (results / "records.jsonl").exists() else None
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(ClusterSpec()))
        launcher = stack.enter_context(contextlib.closing(ForkserverLauncher(cluster)))
        yield stack.enter_context(
            contextlib.closing(Runner(launcher, builtin_adapters(), options, results, _say, held))
        )


def _say(what: str, case: Case, record: Record | None) -> None:
    if record:
        print(f"{what} {case.id}: {record.outcome.status} {record.outcome.message}".rstrip(), flush=True)


def measured(runner: Runner, widths: Sequence[int], worlds: Sequence[int]) -> list[Measured]:
    """Every width on two ranks, the widest on all."""
    quiet, found = Quiet(PATIENCE_SECONDS), []
    for width in widths:
        for world in worlds if width == widths[-1] else [w for w in worlds if w == TIMED]:
            for name, case in cases(width, world).items():
                observed = runner.observe(case)
                timed = None
                if world == TIMED:
                    quiet.wait()
                    timed = runner.time(case)
                found.append(Measured(name=name, observed=observed, timed=timed))
    return found


OPTIONS = RunOptions(observed_steps=3, timed_steps=8, timing_budget_seconds=6.0, warmup=2, assess=Assess.OFF)
"""Whether these train rightly is what `make roster` tells; here they are measured alone."""
