"""How often correct runs fail, counted: `python -m benchmarks.false_alarms` (`make power-long`).

Adds problems of other seeds to what RESULTS holds, until the minutes are over, as often as it is called; and leaves
what was counted in `meshmark/judge/false_alarms.json`, which every verdict quotes. Real adapters have a part of the
time. What an older yardstick came to is not counted. Exits with 1 when there is an alarm.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.honest import PROBLEMS, STEPS, Group, bits, measure_group
from meshmark.adapters import ADAPTERS
from meshmark.environment import machine
from meshmark.judge.false_alarms import COUNTED, Counted, FalseAlarms, merged
from meshmark.judge.yardstick import compare
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.forkserver_launcher import ForkserverLauncher
from meshmark.run.passes.noise import FORMAT
from meshmark.run.record import Record, Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.broken.mutant import GPT, LAYOUTS, under

ADAPTERS_EVERY = 6
"""Of so many groups one is of real adapters: its launches take as long as several groups."""
REAL = [
    (GPT, Precision.FP32),
    (GPT, Precision.BF16),
    (workload("gpt-mini-momentum"), Precision.FP32),
    (workload("vit-digits"), Precision.FP32),
]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What RESULTS/groups.jsonl holds of one group."""

    version: int
    machine: str
    torch: str
    key: str
    """Of what was measured, whatever it is called."""
    group: Group


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.false_alarms", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no group after these (default: 60)")
    parser.add_argument("--processes", type=int, default=2, help="at once (default: 2)")
    parser.add_argument("--results", type=Path, default=Path("results/false-alarms"), help="folder that is added to")
    parser.add_argument("-o", "--output", type=Path, default=COUNTED)
    parsed = parser.parse_args(arguments)
    parsed.results.mkdir(parents=True, exist_ok=True)
    path = parsed.results / "groups.jsonl"
    path.touch()
    lines = read(path)
    for line in measure(lines, parsed.minutes * 60, parsed.processes):
        with path.open("a") as file:
            file.write(json.dumps(encode(line)) + "\n")
        lines.append(line)
        group = line.group
        print(
            f"{max(group.excesses):.2f} {group.what} seed {group.seed}: {len(group.excesses)} runs, {group.worst}",
            flush=True,
        )
    found = counted(lines)
    parsed.output.write_text(json.dumps(encode(found), indent=1) + "\n")
    print(f"{parsed.output}: {found}")
    return 1 if found.alarms else 0


def read(path: Path) -> list[Line]:
    """Of this version; a last line that was cut off is left out."""
    found = []
    for text in path.read_text().splitlines():
        try:
            line: Line = decode(Line, json.loads(text))
        except ValueError:
            continue
        found += [line] if line.version == FORMAT else []
    return found


def counted(lines: Sequence[Line]) -> FalseAlarms:
    """Each group once."""
    once = {(line.key, line.group.seed): line for line in lines}.values()
    return FalseAlarms(
        version=FORMAT,
        machines=sorted({line.machine for line in once}),
        torch=sorted({line.torch for line in once}),
        counted=merged(
            [
                Counted(what=g.what, yardsticks=1, runs=len(g.excesses), alarms=g.alarms)
                for g in (line.group for line in once)
            ]
        ),
    )


def measure(lines: Sequence[Line], seconds: float, processes: int) -> Iterator[Line]:
    """Groups that `lines` lack, as they end."""
    done = {(line.key, line.group.seed) for line in lines}
    deadline, wanted = time.monotonic() + seconds, _wanted(done)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running: set[Future[Line]] = set()
        while True:
            while len(running) < processes and time.monotonic() < deadline:
                running.add(pool.submit(_one, *next(wanted)))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)


def _wanted(done: set[tuple[str, int]]) -> Iterator[tuple[int | None, int]]:
    """Indices of problems, or None for real adapters, with the seeds that are next."""
    adapters = itertools.count()
    problems = ((index, seed) for seed in itertools.count() for index in range(len(PROBLEMS)))
    for number in itertools.count():
        if number % ADAPTERS_EVERY == ADAPTERS_EVERY - 1:
            yield None, next(seed for seed in adapters if ("adapters", seed) not in done)
        else:
            yield next(found for found in problems if (str(found[0]), found[1]) not in done)


def _one(index: int | None, seed: int) -> Line:
    group = measure_adapters(seed) if index is None else measure_group(PROBLEMS[index], seed)
    key = "adapters" if index is None else str(index)
    return Line(version=FORMAT, machine=machine("cpu"), torch=torch.__version__, key=key, group=group)


def measure_adapters(seed: int) -> Group:
    """Real adapters in their layouts; those that compute bit by bit what another computed count once."""
    trained, precision = REAL[seed % len(REAL)]
    problem = dataclasses.replace(trained, seed=seed)
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec()) as cluster:
        runner = Runner(ForkserverLauncher(cluster), ADAPTERS, RunOptions(observed_steps=STEPS), Path(folder))
        for adapter, layout in LAYOUTS.items():
            own = layout if layout.pp > 1 else dataclasses.replace(layout, num_micro_batches=(1, 2, 4)[seed % 3])
            name = adapter.partition("/")[0]
            case = Case(adapter=name, workload=under(adapter, problem), layout=own, precision=precision)
            if not runner.refusal(case):
                records.append(runner.observe(case))
        runner.close()
    judged = [r for r in records if r.outcome.status is Status.OK and r.verdict("equivalence") is not None]
    assert judged, [r.outcome.message for r in records]
    once = {bits(compare(r.equivalence.deviations)): r for r in judged}.values()
    excesses = [(max(r.equivalence.yardstick.excesses(compare(r.equivalence.deviations))), r.case.id) for r in once]
    (_, quantity, step), case_id = max(excesses)
    return Group(
        what=f"adapters, {trained.id} {precision}",
        seed=seed,
        excesses=[worst[0] for worst, _ in excesses],
        worst=f"{case_id}: {quantity}, step {step}",
        tails={},
    )


if __name__ == "__main__":
    sys.exit(main())
