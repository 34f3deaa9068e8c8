"""Tokens (or images) per second with their interval, and model FLOPs utilisation, from a record's raw times.

A case is launched several times until its rate is known. Conditions that differ between launches change all steps of
a launch alike, so the steps of one launch do not show how far another may be off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshmark.measure.laps import (
    LEAST_LAUNCHES,
    GpuPower,
    GpuWatch,
    is_settled,
    laps_of,
    mean_interval,
    nvml,
    power_of,
    together,
)
from meshmark.records.record import Record, Relaunch, TimingEvidence
from meshmark.records.request import Request, Task
from meshmark.spec.case import Matmul
from meshmark.spec.hardware import gpu_of_device
from meshmark.spec.precision import Dtype
from meshmark.theory.model_theory import theory_of

if TYPE_CHECKING:
    from meshmark.launch.launch import Launcher, LaunchResult  # loads torch; a record is read without it
    from meshmark.records.rank_report import RankReport

# --- Tokens (or images) per second, how well they are known, and model FLOPs utilisation, from a record's raw times.

LEAST_CLAIMED = 3
"""Number of launches from which rates are compared.

The steps of one launch do not show how far another may be off, and two launches hardly show it.
"""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rate of a timed pass.

    The interval is over launches made within seconds of one another. With fewer than `LEAST_CLAIMED` launches it is
    over their steps alone, and no claim is based on it.
    """

    per_second: float
    """All tokens or images over the time from the ranks' common start to the last one's end."""
    lowest: float
    """Lower end of the rate's 95 % interval."""
    highest: float
    """Upper end of that interval. Infinite if steps are too few, or scatter too widely, to bound it."""
    relative: float
    """Half the width of the step time's interval, relative to the step time. Infinite for a single step."""
    settled: bool
    """Whether the interval is as narrow as requested. If not, the budget ended first."""
    num_launches: int
    unit: str
    """tokens or images."""
    mfu: float | None
    """Model FLOPs over peak FLOPs in that time (PaLM, arXiv:2204.02311, appendix B); None where no peak is known."""
    peak_source: str
    """Where the peak is from."""

    @property
    def is_claimed(self) -> bool:
        """Whether there are enough launches to compare this rate with others."""
        return self.num_launches >= LEAST_CLAIMED

    def ties(self, other: Throughput) -> bool:
        """Return whether the intervals overlap, so that neither is faster. A rate without a claim ties with none."""
        claimed = self.is_claimed and other.is_claimed
        return claimed and self.lowest <= other.highest and other.lowest <= self.highest


def throughput(record: Record) -> Throughput:
    """Return the rate of a record of the timed pass."""
    workload, interval = record.case.workload, record.timing.interval
    rate = workload.units_per_step / interval.mean
    num_launches = record.timing.num_launches
    shortest, longest = (interval.mean + side * interval.half_width for side in (-1, 1))
    peak, source = peak_flops_per_second(record)
    flops = theory_of(workload.model).flops_per_unit()
    return Throughput(
        per_second=rate,
        lowest=workload.units_per_step / longest,
        highest=workload.units_per_step / shortest if shortest > 0 else float("inf"),
        relative=interval.relative,
        settled=is_settled(len(record.timing.step_seconds), interval, num_launches),
        num_launches=num_launches,
        unit=workload.unit,
        mfu=rate * flops / peak if peak and flops else None,
        peak_source=source,
    )


def fastest_of(records: Sequence[Record]) -> list[Record]:
    """Return the fastest record, followed by those that are tied with it.

    Records with too few launches are left out, so the list may be empty.
    """
    rated = [(rate, record) for record in records if (rate := throughput(record)).is_claimed]
    ordered = sorted(rated, key=lambda each: each[0].per_second, reverse=True)
    return [record for rate, record in ordered if rate.ties(ordered[0][0])]


def peak_flops_per_second(record: Record) -> tuple[float | None, str]:
    """Return the peak of all cores or GPUs that the ranks can use, and its source.

    It is the published peak if the GPU is known, and else the measured one. Ranks that share cores or a GPU share its
    peak.
    """
    machine = record.environment.machine
    if record.environment.device == "cuda":
        count, _, name = machine.partition(" x ")
        gpu, compute = gpu_of_device(name), record.case.precision.compute.short
        if record.case.tuning.matmul is Matmul.TF32 and record.case.precision.compute is Dtype.FP32:
            compute = "tf32"
        if gpu and compute in gpu.peak_flops:
            num_gpus = min(record.case.world_size, int(count) * record.environment.nnodes)
            return gpu.peak_flops[compute] * num_gpus, f"datasheet of {name}"
    return record.timing.peak_flops_per_second, "products of matrices on the cores or GPUs that the ranks share"


def drift(timing: TimingEvidence) -> float:
    """Return how much longer the second halves of launches take than the first halves, on average, as a fraction."""
    seconds = timing.step_seconds
    steps = len(seconds) // timing.num_launches
    if not (half := steps // 2):
        return 0.0
    starts = range(0, len(seconds), steps)
    later = statistics.fmean(each for start in starts for each in seconds[start + steps - half : start + steps])
    return later / statistics.fmean(each for start in starts for each in seconds[start : start + half]) - 1


def values_of(record: Record) -> dict[str, object]:
    """Return the measured numbers of a record, by name."""
    found: dict[str, object] = {"status": str(record.outcome.status), "launch_seconds": round(record.launch.seconds, 3)}
    if record.memory.readings:
        found["peak_bytes"] = max(reading.peak.total for reading in record.memory.readings)
    if record.timing.rank_step_seconds:
        rate = throughput(record)
        found |= {f"{rate.unit}_per_second": rate.per_second, "lowest": rate.lowest, "highest": rate.highest}
    return found


# --- Timed launches, repeated until the rate is known.

MOST_LAUNCHES = 2 * LEAST_LAUNCHES
"""Number of launches after which another one costs more than it is worth."""


def time_again(
    launcher: Launcher, request: Request, first: LaunchResult, power: Sequence[GpuPower]
) -> tuple[list[LaunchResult], list[GpuPower]]:
    """Repeat the timed pass, and return all launches, `first` included, with what was seen of their GPUs.

    Each times as many steps as the first. They end when the rate is known to within PRECISION, when the budget is
    spent, or when a rank fails. The budget is LEAST_LAUNCHES times the request's. A second launch is always followed
    by a third, because two bound the rate poorly.
    """
    launches, watched = [first], [list(power)]
    again = dataclasses.replace(request, steps=len(first.reports[0].step_seconds), timing_budget_seconds=0.0)
    on_gpu = request.device == "cuda"
    while is_wanted(launches, LEAST_LAUNCHES * request.timing_budget_seconds, on_gpu=on_gpu):
        launched, power = launch_watched(launcher, again)
        launches.append(launched)
        watched.append(power)
    return launches, together(watched)


def is_wanted(launches: Sequence[LaunchResult], budget_seconds: float, *, on_gpu: bool = False) -> bool:
    """Return whether another launch is wanted. On GPUs there are as many as a claim needs, whatever the budget."""
    if launches[-1].failures or launches[-1].lost or len(launches) >= MOST_LAUNCHES:
        return False
    if len(launches) < LEAST_CLAIMED and on_gpu:  # where a few steps of a large model are all of the budget
        return budget_seconds > 0
    if len(launches) == 2:  # Student's t gives two launches an interval of thirteen times their difference
        return budget_seconds > 0
    steps = [seconds for launched in launches for seconds in _step_seconds(launched.reports)]
    repeat = len(steps) // len(launches) if len(launches) > 1 else 0
    return sum(steps) < budget_seconds and not is_settled(len(steps), mean_interval(steps, repeat), len(launches))


def _step_seconds(reports: Sequence[RankReport]) -> list[float]:
    laps = laps_of([r.step_seconds for r in reports], [r.lap_starts for r in reports], reports[0].lap_steps)
    return [seconds for lap in laps for seconds in lap.step_seconds]


def relaunch_of(launched: LaunchResult) -> Relaunch:
    """Return the part of a launch that its record keeps."""
    return Relaunch(
        rank_step_seconds=[r.step_seconds for r in launched.reports],
        rank_starts=[r.lap_starts for r in launched.reports],
        rank_cpu_seconds=[r.cpu_seconds for r in launched.reports if r.cpu_seconds],
        losses=launched.losses,
        digests=launched.reports[0].timed_digests,
    )


# --- GPUs during a timed launch.


def launch_watched(launcher: Launcher, request: Request) -> tuple[LaunchResult, list[GpuPower]]:
    """Launch `request`. The GPUs are watched only if it is a timed pass on CUDA."""
    timed = request.task is Task.TIME and request.device == "cuda"
    with nvml() if timed else contextlib.nullcontext() as ask, GpuWatch(ask) as watched:
        launched = launcher.launch(request, request.case.world_size)
    return launched, power_of_ranks(watched, launched.reports)


def power_of_ranks(watched: GpuWatch, reports: Sequence[RankReport]) -> list[GpuPower]:
    """Return the power of the ranks' GPUs from the first rank's start to the last one's end.

    Building and warm-up are left out.
    """
    spans = [report.timed_span for report in reports if report.timed_span]
    if not spans:
        return []
    span = min(start for start, _ in spans), max(stop for _, stop in spans)
    return power_of(watched.samples, [report.kernels.get("GPU", "") for report in reports], span)
