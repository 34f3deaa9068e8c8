"""Whether a record that was read can be computed with: what no run leaves, a damaged or foreign file may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshmark.run.record import Record, Relaunch, Status, TimingEvidence
from meshmark.run.request import Task

_LONGEST_SECONDS = 1e9
_MOST_BYTES = 2**63


def validate_record(record: Record) -> None:
    """Raises `ValueError` for one whose line is no use to anybody."""
    _expect_times(record.timing)
    if record.task is Task.TIME and record.outcome.status is Status.OK and not record.timing.rank_step_seconds:
        raise ValueError("a timed pass that came to its end, and no step's time")
    for reading in record.memory.readings:
        for instant in (value for name in dataclasses.fields(reading) if (value := getattr(reading, name.name))):
            if dataclasses.is_dataclass(instant):
                _expect_bytes([getattr(instant, category.name) for category in dataclasses.fields(instant)])


def _expect_times(timing: TimingEvidence) -> None:
    if timing.lap_steps and sum(timing.lap_steps) != max(map(len, timing.rank_step_seconds), default=0):
        raise ValueError(f"laps of {timing.lap_steps[:4]} steps, which the times are not of")
    launches: list[TimingEvidence | Relaunch] = [timing, *timing.relaunches]
    for launch in launches:
        ranks = launch.rank_step_seconds
        if len({len(steps) for steps in ranks}) > 1:
            raise ValueError(f"times of {' and '.join(str(len(steps)) for steps in ranks[:4])} steps on its ranks")
        if launch.rank_starts and len(launch.rank_starts) != len(ranks):
            raise ValueError(f"times of {len(ranks)} ranks, of which {len(launch.rank_starts)} started")
        for laps in launch.rank_cpu_seconds:
            if not all(0 <= seconds < _LONGEST_SECONDS for seconds in laps):
                raise ValueError(f"laps that took {str(list(laps[:4]))[:80]} seconds of processors")
        for steps in ranks:
            if not (steps and min(steps) >= 0 and 0 < sum(steps) < _LONGEST_SECONDS):
                raise ValueError(f"steps that took {str(list(steps[:4]))[:80]} seconds")


def _expect_bytes(numbers: Sequence[float]) -> None:
    if not all(-_MOST_BYTES < number < _MOST_BYTES for number in numbers):
        raise ValueError("numbers of bytes that no machine has")
