"""The error rates of `meshmark ab`'s sequential test on real frameworks: A against A, and a planted slow-down.

python -m benchmarks.ab [--pairs 300] [--minutes 20]

Pairs of real launches (a fresh process a rank each, in the order AB, BA) of one engine against itself, and against
itself with a pause of 3 % and of 1 % of every step. Each run of the test draws its pairs from those that were measured,
in blocks of two as they came, so that any number of runs comes of a limited number of launches; what is printed names
both numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.slowed import HONEST, SLOWED
from meshmark.regression.alternate import MARGIN, Trial
from meshmark.regression.change import Standing
from meshmark.regression.sequential import LEAST_PAIRS
from meshmark.regression.times import ALPHA
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.forkserver_launcher import ForkserverLauncher
from meshmark.run.request import Task
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

RUNS = 300
MOST_PAIRS = 200


def measure(runner: Runner, adapter: str) -> float:
    """Seconds a step of one fresh launch, in the mean; the logarithm of it."""
    case = Case(adapter=adapter, workload=workload("gpt-mini"), layout=Layout(dp=2, num_micro_batches=2))
    launched = runner.launcher.launch(runner.request(Task.TIME, case), 2)
    if launched.failures:
        raise SystemExit(f"{adapter}: {launched.failures[0].message}")
    ranks = [report.step_seconds for report in launched.reports]
    return math.log(statistics.fmean(map(max, zip(*ranks, strict=True))))


def pairs(runner: Runner, a: str, b: str, count: int, until: float) -> list[float]:
    """Differences of logarithms, pair by pair."""
    found = list[float]()
    while len(found) < count and time.monotonic() < until:
        if len(found) % 2 == 0:
            ours, theirs = measure(runner, a), measure(runner, b)
        else:
            theirs, ours = measure(runner, b), measure(runner, a)
        found.append(theirs - ours)
    return found


def decided(differences: list[float], rng: np.random.Generator, *, equal: bool) -> list[tuple[Standing, int]]:
    """How RUNS runs of the test end, and after how many pairs; blocks of AB and BA are drawn together. Which of two
    `equal` sides is called A is nobody's merit: the sign of each block is drawn too."""
    blocks, ends = np.array(differences[: len(differences) // 2 * 2]).reshape(-1, 2), []
    for _ in range(RUNS):
        drawn = blocks[rng.integers(len(blocks), size=MOST_PAIRS // 2)]
        drawn = (drawn * rng.choice([-1, 1], size=(len(drawn), 1)) if equal else drawn).ravel()
        standing, count = Standing.UNDECIDED, LEAST_PAIRS
        for count in range(LEAST_PAIRS, MOST_PAIRS + 1, 2):
            trial = Trial(unit=(1, ""), ours=[0.0] * count, theirs=list(drawn[:count]))
            if (standing := trial.standing(ALPHA, MARGIN)) is not Standing.UNDECIDED:
                break
        ends.append((standing, count))
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=20.0, help="at most, of each comparison")
    asked = parser.parse_args()
    targets = {name: f"benchmarks.slowed:{name}" for name in (HONEST, *SLOWED)}
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        launcher = ForkserverLauncher(stack.enter_context(Cluster(ClusterSpec())))
        options = RunOptions(timed_steps=16, timing_budget_seconds=0.0)
        runner = stack.enter_context(contextlib.closing(Runner(launcher, targets, options, Path(folder))))
        measure(runner, HONEST)
        for b in (HONEST, *SLOWED):
            found = pairs(runner, HONEST, b, asked.pairs, time.monotonic() + 60 * asked.minutes)
            print(" ".join(f"{difference:.4f}" for difference in found))
            ends = decided(found, rng, equal=b == HONEST)
            counts = {s: sum(end is s for end, _ in ends) for s in Standing}
            print(
                f"{HONEST} against {b}: {len(found)} pairs scatter by {statistics.stdev(found):.1%} around "
                f"{statistics.fmean(found):+.2%}; of {RUNS} runs "
                + ", ".join(f"{share / RUNS:.1%} {standing}" for standing, share in counts.items())
                + f"; {statistics.median(n for _, n in ends):.0f} pairs in the median",
                flush=True,
            )


if __name__ == "__main__":
    main()
