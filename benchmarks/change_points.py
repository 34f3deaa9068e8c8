"""`meshmark history`'s change points beside Apache Otava's, on recorded series: false alarms, and planted changes.

PYTHONPATH=.:DIR python -m benchmarks.change_points

with DIR from `pip install --no-deps --target DIR apache-otava` (0.8.0 asks for numpy 2.2, which Meshmark's versions are
not). A series is a case's raw step seconds of a recorded baseline: real noise of real engines, odd steps among them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshmark.records.record_file import read_records
from meshmark.regression.history import Series, change_points
from meshmark.regression.run_file import TIMES, Run

BASELINE = Path(__file__).parent.parent / "baselines" / "epyc-2cpu"
LEAST_STEPS = 30
SHIFTS = (1.05, 1.1, 1.2, 1.4)
NEAR = 2
"""Steps that a change may be off."""


def recorded() -> list[np.ndarray]:
    timed = [r.timing.step_seconds for r in read_records(BASELINE).records if r.timing.rank_step_seconds]
    return [np.array(steps) for steps in timed if len(steps) >= LEAST_STEPS]


def ours(values: np.ndarray) -> list[int]:
    runs = [Run(name="", date=f"{i:06}", commit="", machine="", versions={}, values={}) for i in range(len(values))]
    return [p.index for p in change_points([Series(case="", metric=TIMES[0], runs=runs, values=list(values))])]


def otavas(values: np.ndarray) -> list[int]:
    """By its defaults: a window of 30, p below 0.001."""
    from otava.analysis import compute_change_points

    found, _ = compute_change_points(list(values), window_len=30, max_pvalue=0.001, min_magnitude=0.0)
    return [int(point.index) for point in found]


def main() -> None:
    all_series, rng = recorded(), np.random.default_rng(0)
    print(f"{len(all_series)} recorded series of {min(map(len, all_series))} to {max(map(len, all_series))} steps")
    methods: dict[str, Callable[[np.ndarray], list[int]]] = {"ruptures + t": ours, "otava": otavas}
    for name, find in methods.items():
        try:
            shuffled = [find(rng.permutation(s)) for s in all_series for _ in range(20)]  # no change is left in these
        except ImportError:
            print(f"{name}: not installed; see the top of this file")
            continue
        told = [f"false alarms in {np.mean([bool(f) for f in shuffled]):.1%} of {len(shuffled)} shuffled series"]
        for shift in SHIFTS:
            hits, extra = 0, 0
            for series in all_series:
                mixed = rng.permutation(series)
                middle = len(mixed) // 2
                found = find(np.where(np.arange(len(mixed)) < middle, mixed, mixed * shift))
                near = [index for index in found if abs(index - middle) <= NEAR]
                hits, extra = hits + bool(near), extra + len(found) - len(near[:1])
            told.append(f"{shift - 1:+.0%}: {hits}/{len(all_series)} found, {extra} others")
        print(f"{name}: {'; '.join(told)}")


if __name__ == "__main__":
    main()
