"""The error rates of `meshmark ab`'s sequential test on real frameworks: A against A, and a planted slow-down.

python -m benchmarks.ab [--pairs 300] [--minutes 20] [--keep results/ab-pairs.jsonl]

Every pair is kept as it is measured, and the same command goes on from there: a quiet hour may come in pieces. Pairs of
real launches (a fresh process a rank each, in the order AB, BA) of one engine against itself, and against
itself with a pause of 3 % and of 1 % of every step. Each run of the test draws its pairs from those that were measured,
in blocks of two as they came, so that any number of runs comes of a limited number of launches; what is printed names
both numbers. It ends with 1 where a promise is not kept, and with 5 while pairs are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.slowed import HONEST, SLOWED
from meshmark.environment import describe
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.request import Task
from meshmark.regression.alternate import MARGIN, Trial
from meshmark.regression.change import ChangeOutcome
from meshmark.regression.sequential import LEAST_PAIRS
from meshmark.regression.times import ALPHA
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

RUNS = 300
MOST_PAIRS = 200
FOUND = "Slow3"
LEAST_FOUND = 0.9
"""Share of runs that must find a slow-down of 3 %."""


WORKLOAD = replace(workload("gpt-mini"), global_batch=256)
"""Steps of some 40 ms on two cores. Those of gpt-mini's own batch last 8 ms, of which most is how the scheduler wakes
two ranks: launches of half a second scatter by 11 % then, and the same promise takes six times the pairs."""
STEPS = 24
"""One second a launch."""


def measure(runner: Runner, adapter: str) -> float:
    """Seconds a step of one fresh launch, in the mean; the logarithm of it."""
    case = Case(adapter=adapter, workload=WORKLOAD, layout=Layout(dp=2, num_micro_batches=2))
    launched = runner.launcher.launch(runner.request(Task.TIME, case), 2)
    if launched.failures:
        raise SystemExit(f"{adapter}: {launched.failures[0].message}")
    ranks = [report.step_seconds for report in launched.reports]
    return math.log(statistics.fmean(map(max, zip(*ranks, strict=True))))


class Kept:
    """Differences of logarithms, pair by pair, in a file that the next run reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        here = describe("cpu", "gloo", 1)
        self._where = {
            "machine": here.machine,
            "torch": here.versions["torch"],
            "batch": WORKLOAD.global_batch,
            "steps": STEPS,
        }
        self._lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if elsewhere := [
            line for line in self._lines if any(line.get(name) != value for name, value in self._where.items())
        ]:
            raise SystemExit(f"{path}: {len(elsewhere)} pairs are not of {self._where}: --keep another file")

    def of(self, b: str) -> list[float]:
        """In whole blocks of AB and BA: half a block of an earlier run has no other half of its time."""
        return [line["difference"] for line in self._lines if line["b"] == b]

    def add(self, b: str, block: tuple[float, float]) -> None:
        """On disk when this returns, both or (but for a torn line, which the next run refuses) none."""
        lines = [{"b": b, "difference": difference, **self._where} for difference in block]
        self._lines += lines
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def pairs(runner: Runner, b: str, kept: Kept, count: int, until: float) -> list[float]:
    """Differences of logarithms, pair by pair: those kept, and more until there are enough or the time is up."""
    while len(kept.of(b)) < count and time.monotonic() < until:
        first, second = (measure(runner, name) for name in (HONEST, b))
        third, fourth = (measure(runner, name) for name in (b, HONEST))
        kept.add(b, (second - first, third - fourth))
    return kept.of(b)


def decided(differences: list[float], rng: np.random.Generator, *, equal: bool) -> list[tuple[ChangeOutcome, int]]:
    """How RUNS runs of the test end, and after how many pairs; blocks of AB and BA are drawn together. Which of two
    `equal` sides is called A is nobody's merit: the sign of each block is drawn too."""
    blocks, ends = np.array(differences[: len(differences) // 2 * 2]).reshape(-1, 2), []
    for _ in range(RUNS):
        drawn = blocks[rng.integers(len(blocks), size=MOST_PAIRS // 2)]
        drawn = (drawn * rng.choice([-1, 1], size=(len(drawn), 1)) if equal else drawn).ravel()
        outcome, count = ChangeOutcome.UNDECIDED, LEAST_PAIRS
        for count in range(LEAST_PAIRS, MOST_PAIRS + 1, 2):
            trial = Trial(unit=(1, ""), ours=[0.0] * count, theirs=list(drawn[:count]))
            if (outcome := trial.outcome(ALPHA, MARGIN)) is not ChangeOutcome.UNDECIDED:
                break
        ends.append((outcome, count))
    return ends


def summarize(b: str, found: list[float], rng: np.random.Generator) -> tuple[str, dict[ChangeOutcome, float]]:
    """Return the lines to print of one comparison, and the share of runs for each outcome."""
    ends = decided(found, rng, equal=b == HONEST)
    shares = {outcome: sum(end is outcome for end, _ in ends) / RUNS for outcome in ChangeOutcome}
    text = (
        f"{HONEST} against {b}: {len(found)} pairs scatter by {statistics.stdev(found):.1%} around "
        f"{statistics.fmean(found):+.2%}; of {RUNS} runs "
        + ", ".join(f"{share:.1%} {outcome}" for outcome, share in shares.items())
        + f"; {statistics.median(n for _, n in ends):.0f} pairs in the median"
    )
    return text, shares


def broken(b: str, shares: dict[ChangeOutcome, float]) -> bool:
    """Whether the promise of this comparison is; of a slow-down of 1 % there is none, it is only told."""
    if b == HONEST:
        return shares[ChangeOutcome.WORSE] + shares[ChangeOutcome.BETTER] > ALPHA
    return b == FOUND and shares[ChangeOutcome.WORSE] < LEAST_FOUND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300, help="of equals; of a slowed engine a third")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most, of each comparison")
    parser.add_argument(
        "--keep", type=Path, default=Path("results/ab-pairs.jsonl"), help="what the next run goes on from"
    )
    asked = parser.parse_args()
    targets = {name: f"benchmarks.slowed:{name}" for name in (HONEST, *SLOWED)}
    rng, kept, missing, failed = np.random.default_rng(0), Kept(asked.keep), False, False
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        launcher = ForkserverLauncher(stack.enter_context(Cluster(ClusterSpec())))
        options = RunOptions(timed_steps=STEPS, timing_budget_seconds=0.0)
        runner = stack.enter_context(contextlib.closing(Runner(launcher, targets, options, Path(folder))))
        measure(runner, HONEST)
        for b in (HONEST, *SLOWED):
            wanted = asked.pairs if b == HONEST else asked.pairs // 3
            found = pairs(runner, b, kept, wanted, time.monotonic() + 60 * asked.minutes)
            if len(found) < max(wanted, LEAST_PAIRS):
                missing = True
                print(f"{HONEST} against {b}: {len(found)} of {wanted} pairs; the same command goes on", flush=True)
            if len(found) >= LEAST_PAIRS:
                text, shares = summarize(b, found, rng)
                failed = failed or broken(b, shares)
                print(text, flush=True)
    return 5 if missing else int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
