"""Timed launches, repeated until the rate is known.

What the processes of one launch meet moves all of its steps alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from meshmark.launch.launch import Launcher, LaunchResult
from meshmark.measure.gpu_power import GpuPower, GpuWatch, nvml, power_of, together
from meshmark.measure.interval import mean_interval
from meshmark.measure.laps import LEAST_LAUNCHES, is_settled, laps_of
from meshmark.records.rank_report import RankReport
from meshmark.records.record import Relaunch
from meshmark.records.request import Request, Task
from meshmark.run.throughput import LEAST_CLAIMED

# --- Repeated timed launches. What the processes of one launch meet moves all of its steps alike.

MOST_LAUNCHES = 2 * LEAST_LAUNCHES
"""Another tells less than it costs."""


def time_again(
    launcher: Launcher, request: Request, first: LaunchResult, power: Sequence[GpuPower]
) -> tuple[list[LaunchResult], list[GpuPower]]:
    """All launches of the timed pass, `first` among them, and what was seen of their GPUs.

    Each times as many steps as the first. They end when the rate is known to within PRECISION, when the budget of timed
    steps is over (a launch's share of it is the request's; there are never two alone), or with one in which a rank
    fails.
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
    if len(launches) == 2:  # of which Student's t makes an interval of thirteen times what they differ by
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
    """Launch `request`, and watch its GPUs if they are timed; of anything else nothing is asked."""
    timed = request.task is Task.TIME and request.device == "cuda"
    with nvml() if timed else contextlib.nullcontext() as ask, GpuWatch(ask) as watched:
        launched = launcher.launch(request, request.case.world_size)
    return launched, power_of_ranks(watched, launched.reports)


def power_of_ranks(watched: GpuWatch, reports: Sequence[RankReport]) -> list[GpuPower]:
    """From the first rank's start to the last one's end, warm-up and building left out."""
    spans = [report.timed_span for report in reports if report.timed_span]
    if not spans:
        return []
    span = min(start for start, _ in spans), max(stop for _, stop in spans)
    return power_of(watched.samples, [report.kernels.get("GPU", "") for report in reports], span)
