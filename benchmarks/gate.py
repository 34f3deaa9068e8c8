"""The outcomes of `meshmark ab` for planted slow-downs, their cost in pairs, and its false alarms on unchanged code.

python -m benchmarks.gate [--minutes 5] [--keep results/gate-pairs.jsonl] [--page reports/gate.md]

A pair is two fresh launches of DDP on two ranks, in the order AB, BA, beside two busy loops that this command starts
(or, with `--load 0`, none). Every pair is kept as it is measured, and the same command goes on from there. The page is
made of all pairs that are kept: they are cut into runs, one behind the other, each pair in one run alone; a run ends
when `meshmark ab` would end it, or after MOST_PAIRS. `--minutes 0` writes the page alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planted import HONEST, PLANTED, PRODUCTS
from meshmark.environment import Environment, describe
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.request import Task
from meshmark.regression.alternate import MARGIN, CaseTrials, Trial
from meshmark.regression.change import ChangeOutcome
from meshmark.regression.samples import CPU, STEP
from meshmark.regression.sequential import LEAST_PAIRS
from meshmark.regression.times import ALPHA
from meshmark.report.kept_page import keep_page
from meshmark.report.table import table
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from meshmark.text import pluralize

MOST_PAIRS = 10
STEPS = 10
CASE = Case(adapter=HONEST, workload=workload("gpt-tiny"), layout=Layout(dp=2, num_micro_batches=2))
LOAD = 2
"""Busy loops: one a core of the machine that this is for."""
_TURNS = (*[HONEST] * 5, *PLANTED)
"""Which side is B, block by block."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Differences of logarithms of seconds a step, B's less A's."""

    b: str
    load: int
    clock: float
    processor: float
    seconds: float
    """That both launches took."""
    machine: str
    torch: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the test."""

    outcome: ChangeOutcome
    num_pairs: int


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def launch(runner: Runner, adapter: str) -> tuple[float, float]:
    """Seconds a step of one fresh launch, by the clock and of both ranks' processors."""
    launched = runner.launcher.launch(runner.request(Task.TIME, CASE_OF[adapter]), 2)
    if launched.failures:
        raise SystemExit(f"{adapter}: {launched.failures[0].message}")
    clock = statistics.fmean(map(max, zip(*[report.step_seconds for report in launched.reports], strict=True)))
    return clock, sum(sum(report.cpu_seconds) for report in launched.reports) / STEPS


CASE_OF = {name: Case(adapter=name, workload=CASE.workload, layout=CASE.layout) for name in (HONEST, *PLANTED)}


def measure(runner: Runner, keep: Path, load: int, seconds: float, here: Environment) -> None:
    """Blocks of AB and BA until the time is up, each on disk when it is whole."""
    until, first = time.monotonic() + seconds, 0
    if keep.exists():
        first = len(read(keep)) // 2
    keep.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < until:
        b = _TURNS[first % len(_TURNS)]
        first += 1
        lines = list[str]()
        for names in ((HONEST, b), (b, HONEST)):
            started = time.monotonic()
            one, other = (launch(runner, name) for name in names)
            (a_clock, a_cpu), (b_clock, b_cpu) = (other, one) if lines else (one, other)
            pair = Pair(
                b=b,
                load=load,
                clock=math.log(b_clock / a_clock),
                processor=math.log(b_cpu / a_cpu),
                seconds=round(time.monotonic() - started, 2),
                machine=f"{here.machine}, {here.num_cpus} CPUs",
                torch=here.versions["torch"],
            )
            lines.append(json.dumps(vars(pair)) + "\n")
        with keep.open("a") as file:
            file.write("".join(lines))


def read(keep: Path) -> list[Pair]:
    return [Pair(**json.loads(line)) for line in keep.read_text().splitlines()]


def runs_of(pairs: Sequence[Pair], *, by_clock: bool = False) -> list[Run]:
    """Those that the pairs make, one behind the other; what is left over at the end makes none. `by_clock`: without
    processor time."""
    found, start = list[Run](), 0
    for end in range(1, len(pairs) + 1):
        held = pairs[start:end]
        clock, processor = (
            Trial(unit=(1, ""), metric=metric, ours=[0.0] * len(held), theirs=[getattr(p, name) for p in held])
            for metric, name in ((STEP, "clock"), (CPU, "processor"))
        )
        outcome = CaseTrials(clock=clock, processor=None if by_clock else processor).outcome(ALPHA, MARGIN)
        decided = outcome is not ChangeOutcome.UNDECIDED and len(held) >= LEAST_PAIRS
        if decided or len(held) == MOST_PAIRS:
            found.append(Run(outcome=outcome, num_pairs=len(held)))
            start = end
    return found


def calibrate(runner: Runner) -> float:
    """How many products take as long as the step of both ranks together, on one rank's half of it."""
    cpu = statistics.median(launch(runner, HONEST)[1] for _ in range(3)) / 2
    import torch  # this process launches, and trains nothing

    torch.set_num_threads(1)
    matrix, count = torch.ones(64, 64) / 64, 2000
    started = time.process_time()
    for _ in range(count):
        matrix @ matrix
    return cpu / ((time.process_time() - started) / count)


def page(pairs: Sequence[Pair], commit: str) -> str:
    machines = sorted({f"{p.machine}, torch {p.torch}" for p in pairs})
    parts = [
        "# What `meshmark ab` decides",
        f"Made by `python -m benchmarks.gate` (`make gate`) at {commit or 'no commit'}, from {len(pairs)} pairs on "
        f"{'; '.join(machines)}. {__doc__.split(chr(10) * 2)[2].replace(chr(10), ' ')}",
        "Planted is more to compute: matrix products, as many as take the share of a step's processor time. A run "
        f"ends *slower* where the clock, or processor time by {MARGIN:.0%} or more, shows it; each test may be wrong "
        f"in {ALPHA / 2:.1%} of runs. *By the clock alone*, without processor time, the same pairs make fewer, "
        "longer runs.",
    ]
    for load in sorted({p.load for p in pairs}):
        rows = []
        for name in (HONEST, *PLANTED):
            own = [p for p in pairs if p.load == load and p.b == name]
            runs = runs_of(own)
            if not runs:
                continue
            counts = [sum(run.outcome is outcome for run in runs) for outcome in ChangeOutcome]
            found = dict(zip(ChangeOutcome, counts, strict=True))
            alone = runs_of(own, by_clock=True)
            clock = sum(run.outcome is ChangeOutcome.WORSE for run in alone)
            scatter = [statistics.stdev(getattr(p, each) for p in own) for each in ("clock", "processor")]
            mean = statistics.fmean(p.processor for p in own)
            seconds = statistics.fmean(p.seconds for p in own)
            ends = [run.num_pairs for run in runs if run.outcome is not ChangeOutcome.UNDECIDED]
            rows.append(
                {
                    "planted": f"{PLANTED[name]:.0%}" if name in PLANTED else "nothing",
                    "measured": f"{math.expm1(mean):+.1%}",
                    "runs": len(runs),
                    "slower": found[ChangeOutcome.WORSE],
                    "same or faster": found[ChangeOutcome.SAME] + found[ChangeOutcome.BETTER],
                    "cannot tell": found[ChangeOutcome.UNDECIDED],
                    "slower by the clock alone": f"{clock} of {len(alone)}",
                    "pairs, median of the decided": f"{statistics.median(ends):.0f}" if ends else "-",
                    "seconds a pair": f"{seconds:.1f}",
                    "scatter, clock": f"{scatter[0]:.1%}",
                    "scatter, processor": f"{scatter[1]:.1%}",
                }
            )
        beside = f"Beside {pluralize(load, 'busy loop')}" if load else "On an otherwise idle machine"
        parts += [f"## {beside}, at most {MOST_PAIRS} pairs a run", table(rows)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--load", type=int, default=LOAD, help="busy loops beside it")
    parser.add_argument("--keep", type=Path, default=Path("results/gate-pairs.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("reports/gate.md"))
    asked = parser.parse_args()
    here = describe("cpu", "gloo", 1)
    if asked.minutes:
        targets = {name: f"benchmarks.planted:{name}" for name in (HONEST, *PLANTED)}
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options = RunOptions(timed_steps=STEPS, timing_budget_seconds=0.0)
            os.environ[PRODUCTS] = "0"
            with contextlib.ExitStack() as first:
                launcher = ForkserverLauncher(first.enter_context(Cluster(ClusterSpec())))
                calibrating = first.enter_context(contextlib.closing(Runner(launcher, targets, options, folder / "a")))
                products = calibrate(calibrating)
                launcher.close()
            os.environ[PRODUCTS] = str(products)
            launcher = ForkserverLauncher(stack.enter_context(Cluster(ClusterSpec())))
            stack.enter_context(contextlib.closing(launcher))
            runner = stack.enter_context(contextlib.closing(Runner(launcher, targets, options, folder / "b")))
            stack.enter_context(busy(asked.load))
            launch(runner, HONEST)
            measure(runner, asked.keep, asked.load, 60 * asked.minutes, here)
    keep_page(page(read(asked.keep), here.commit), asked.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
