"""The untouched pass once more, and again: what a launch's processes met moves all its steps alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshmark.measure.gpu_power import GpuPower, together
from meshmark.measure.interval import mean_interval
from meshmark.measure.laps import LEAST_LAUNCHES, is_settled, laps_of
from meshmark.run.launch import Launcher, LaunchResult
from meshmark.run.power import launch_watched
from meshmark.run.rank_report import RankReport
from meshmark.run.record import Relaunch
from meshmark.run.request import Request
from meshmark.run.throughput import LEAST_CLAIMED

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
    """Whether another launch is. On GPUs there are as many as a claim takes, whatever the budget."""
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
    """What its record keeps of it."""
    return Relaunch(
        rank_step_seconds=[r.step_seconds for r in launched.reports],
        rank_starts=[r.lap_starts for r in launched.reports],
        rank_cpu_seconds=[r.cpu_seconds for r in launched.reports if r.cpu_seconds],
        losses=launched.losses,
        digests=launched.reports[0].timed_digests,
    )
