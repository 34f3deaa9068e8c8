"""Times of the launches of one case, and how far launches of the same code scatter."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark.environment import Environment
from meshmark.measure.laps import student_t
from meshmark.records.record import Record, Status
from meshmark.regression.runs import CaseRuns

STEP, CPU, LAUNCH, BUILD = "step", "cpu", "launch", "build"
"""Metrics in seconds: a step of the timed pass by the clock, the same by processor time of all ranks, the whole
instrumented pass, and the build of its slowest rank's engine.
"""
WORDS = {CPU: "CPU seconds a step", LAUNCH: "launch seconds", BUILD: "build seconds"}
LEAST_DEGREES = 4
"""Least degrees of freedom from repeats of one case for which its own scatter is used alone."""
RECORDED = Path(__file__).with_name("launch_scatter.json")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One launch."""

    seconds: float
    """Mean seconds of its steps."""
    variance: float = 0.0
    """Variance of the logarithm of `seconds`, estimated from blocks of steps. Infinite for a single step."""
    steps: int = 1
    machine: str = ""
    """Machine that the launch was measured on."""
    took: float = 0.0
    """Seconds of the whole pass: the cost of another sample, besides starting its session."""

    @property
    def log(self) -> float:
        return math.log(self.seconds)


def samples(runs: CaseRuns) -> dict[str, list[Sample]]:
    """Return samples by metric, in the order of launches."""
    complete = [r for r in runs.observed if r.outcome.status is Status.OK]
    found = {
        STEP: [_of_steps(record) for record in runs.complete],
        CPU: [_of_start(r, r.timing.cpu_seconds_per_step) for r in runs.complete if r.timing.cpu_seconds_per_step],
        LAUNCH: [_of_start(r, r.launch.seconds) for r in complete if r.launch.seconds > 0],
        BUILD: [_of_start(r, r.launch.build_seconds) for r in complete if r.launch.build_seconds > 0],
    }
    return {metric: each for metric, each in found.items() if each}


def _of_start(record: Record, seconds: float) -> Sample:
    return Sample(seconds=seconds, machine=machine_of(record.environment))


def machine_of(environment: Environment) -> str:
    """Return a name for the machine, as far as a record distinguishes machines."""
    return f"{environment.machine}, {environment.num_cpus} CPUs"


def _of_steps(record: Record) -> Sample:
    """Return a sample from blocks as long as neighbours are correlated, or from launches; see `mean_interval`."""
    found, steps = record.timing.interval, len(record.timing.step_seconds)
    blocks = steps // found.block
    error = found.relative / student_t(blocks - 1) if blocks > 1 else math.inf
    return Sample(
        seconds=found.mean,
        variance=error**2,
        steps=steps,
        machine=machine_of(record.environment),
        took=record.launch.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Scatter between launches of the same code."""

    variance: float
    """Variance of the logarithm of one launch's seconds."""
    degrees: float
    """Degrees of freedom of the estimate."""
    source: str
    machines: frozenset[str] = frozenset()
    """Machines, among those compared, whose launches it was estimated from."""


def repeats_scatter(groups: Iterable[Sequence[Sample]], source: str) -> Scatter | None:
    """Return the scatter of launches around the mean of their group, or None if no group repeats."""
    squares, degrees, within, machines = 0.0, 0, list[float](), set[str]()
    for group in groups:
        if len(group) > 1:
            squares += statistics.variance(s.log for s in group) * (len(group) - 1)
            degrees += len(group) - 1
            machines |= {s.machine for s in group}
            within += [s.variance for s in group if math.isfinite(s.variance)]
    if not degrees:
        return None
    floor = statistics.fmean(within) if within else 0.0  # a few launches may agree by luck better than their steps do
    variance = max(squares / degrees, floor)
    return Scatter(variance=variance, degrees=degrees, source=source.format(degrees), machines=frozenset(machines))


@functools.cache
def recorded_scatter(metric: str) -> Scatter:
    """Return the scatter measured by `python -m benchmarks.launch_scatter`, for folders without repeats.

    It comes from another machine, so it decides nothing. It only says how many launches would resolve a difference.
    """
    told = json.loads(RECORDED.read_text())
    found = told["metrics"][metric]
    return Scatter(variance=found["deviation"] ** 2, degrees=found["degrees"], source=f"measured on {told['machine']}")


def minutes(seconds: float) -> str:
    """Return a duration in words."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:,.0f} minutes"
