"""What was seen of the GPUs of a launch's ranks while they were timed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from meshmark.measure.gpu_power import GpuPower, GpuWatch, nvml, power_of
from meshmark.run.launch import Launcher, LaunchResult
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request, Task


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
