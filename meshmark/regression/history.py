"""Series of many runs per case and metric, and the points where they changed for good.

Exact metrics change where a value does. Times are cut where a mean changes, by PELT (Killick et al., JASA 107, 1590,
2012; `ruptures`) on logarithms. A cut is kept if Student's t between its two sides is significant among all candidates
(Holm). `python -m benchmarks.change_points` compares this with Apache Otava on recorded series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.ndimage
from scipy.special import stdtr

from meshmark.errors import MeshmarkError
from meshmark.regression.run_file import TIMES, Run
from meshmark.regression.times import holm

ALPHA = 0.01
"""Probability that a history of unchanging code shows any change of a time."""
LEAST_RUNS = 3
"""Least number of runs on either side of a change of a time. Fewer look like a single odd run."""
_STRICT = 4.0
"""PELT's penalty, in variances times log of the length. It exceeds BIC's 2 for a cut and its mean."""
_MAD = 1.4826
_RESOLUTION = 1e-6
"""Resolution of a time, as a share. Series with less variation are treated as constant."""
_AROUND, _FAR = 5, 2.5
"""Window of runs around one, including itself, and how many scatters a run may be off their median before it is
clipped.
"""


@dataclass(kw_only=True)
class Series:
    """One metric of one case, oldest run first."""

    case: str
    metric: str
    runs: list[Run] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """A point where a series changed."""

    series: Series
    index: int
    """Index of the first run after the change."""
    before: float
    after: float
    p: float
    """p-value of Student's t. 0 for exact metrics."""

    @property
    def run(self) -> Run:
        return self.series.runs[self.index]

    @property
    def last_before(self) -> Run:
        return self.series.runs[self.index - 1]

    def __str__(self) -> str:
        run, last = self.run, self.last_before
        share = f" ({self.after / self.before - 1:+.1%})" if self.before else ""
        moved = [
            f"{name} {last.versions.get(name, 'none')} -> {v}"
            for name, v in run.versions.items()
            if last.versions.get(name) != v
        ]
        versions = f"; {', '.join(moved)}" if moved else ""
        chance = f"; p = {self.p:.2g}" if self.series.metric in TIMES else ""
        return (
            f"{run.when[0]} {run.commit or 'no commit'} {self.series.case}: {self.series.metric} {self.before:,.6g} -> "
            f"{self.after:,.6g}{share}, after {last.commit or 'no commit'}{versions}{chance}"
        )


def series_of(runs: Iterable[Run]) -> list[Series]:
    """Return series by case and metric, ordered by commit, and by run for equal commits."""
    found: dict[tuple[str, str], Series] = {}
    for run in sorted(runs, key=lambda run: run.when):
        for case, metrics in run.values.items():
            for metric, value in metrics.items():
                series = found.setdefault((case, metric), Series(case=case, metric=metric))
                series.runs.append(run)
                series.values.append(value)
    return list(found.values())


def change_points(all_series: Sequence[Series]) -> list[ChangePoint]:
    """Return the change points of every series, by date. Those of times are corrected for the number of series."""
    found, timed = list[ChangePoint](), list[ChangePoint]()
    for series in all_series:
        if series.metric in TIMES:
            timed += _of_times(series)
        else:
            found += _exact(series)
    chances: Mapping[tuple[str, str], float] = {(str(i), ""): point.p for i, point in enumerate(timed)}
    looked_at = sum(series.metric in TIMES for series in all_series)
    level = ALPHA * min(1.0, len(timed) / max(looked_at, 1))  # a series without a cut was looked at too
    decided = holm(chances, level)
    found += [point for i, point in enumerate(timed) if decided[str(i), ""][0]]
    return sorted(found, key=lambda point: (point.run.when, point.series.case, point.series.metric))


def _exact(series: Series) -> list[ChangePoint]:
    return [
        ChangePoint(series=series, index=i, before=series.values[i - 1], after=series.values[i], p=0.0)
        for i in range(1, len(series.values))
        if series.values[i] != series.values[i - 1]
    ]


def _of_times(series: Series) -> list[ChangePoint]:
    logs = tamed(np.log(series.values))
    ends = [0, *cuts(logs), len(logs)]
    found = []
    for start, cut, end in zip(ends, ends[1:], ends[2:], strict=False):
        left, right = logs[start:cut], logs[cut:end]
        before, after = (float(np.exp(side.mean())) for side in (left, right))
        if abs(after / before - 1) < _RESOLUTION:
            continue  # rounding's, in a series that does not vary
        chance = _chance(left, right, len(logs))
        found.append(ChangePoint(series=series, index=cut, before=before, after=after, p=chance))
    return found


def _scatter(values: np.ndarray) -> float:
    """Return the scatter of neighbouring values. A change affects only one pair of neighbours."""
    steps = np.diff(values)
    return _MAD * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2) if len(steps) else 0.0


def tamed(values: np.ndarray) -> np.ndarray:
    """Return values with outliers clipped towards their neighbours, so that an odd run does not look like a change."""
    around = scipy.ndimage.median_filter(values, size=_AROUND, mode="nearest")
    far = _FAR * _scatter(values)
    return np.clip(values, around - far, around + far) if far else values


def cuts(values: np.ndarray) -> list[int]:
    """Return the indices where the mean changes: the first index of each segment after the first."""
    if len(values) < 2 * LEAST_RUNS:
        return []
    try:
        import ruptures  # of all commands this one needs it, and a machine lent for a day may lack it
    except ImportError as error:
        raise MeshmarkError(
            "changes of times are found by ruptures, which is not installed: pip install ruptures"
        ) from error
    scatter = max(_scatter(values), _RESOLUTION)
    found = ruptures.KernelCPD(kernel="linear", min_size=LEAST_RUNS).fit(values.reshape(-1, 1) / scatter)
    return [int(cut) for cut in found.predict(pen=_STRICT * math.log(len(values)))[:-1]]


def _chance(left: np.ndarray, right: np.ndarray, length: int) -> float:
    """Return the p-value of the difference, corrected for the possible positions of a segment's two ends."""
    degrees = len(left) + len(right) - 2
    spread = (left.var() * len(left) + right.var() * len(right)) / degrees
    error = math.sqrt(spread * (1 / len(left) + 1 / len(right)))
    if not error:
        return 0.0
    once = 2 * float(stdtr(degrees, -abs(right.mean() - left.mean()) / error))
    return min(once * length**2 / 2, 1.0)
