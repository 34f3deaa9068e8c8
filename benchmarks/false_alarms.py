"""How often correct runs fail, counted: `python -m benchmarks.false_alarms` (`make power-long`).

Adds problems of other seeds to what RESULTS holds, until the minutes are over, as often as it is called; and leaves
what was counted in `meshmark/judge/false_alarms.json`, which every verdict quotes. Small models of which many runs are
computed at once, `single` and real adapters each have a share of the time. What an older tolerance model came to is not
counted. Exits with 1 when alarms are more frequent than the tolerance model aims at.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.honest import STEPS, Group, bits, measure_batched, measure_single
from benchmarks.problems import PROBLEMS, SMALL, varied
from meshmark.adapter.registry import builtin_adapters
from meshmark.environment import machine
from meshmark.judge.tolerance_model import (
    COUNTED,
    FALSE_ALARMS,
    AlarmCounts,
    FalseAlarms,
    compare,
    design_effect,
    merged,
)
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.launch.processes import die_with_parent
from meshmark.passes.noise import FORMAT
from meshmark.records.record import Record, Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.broken.mutant import GPT, under
from tests.broken.mutants import BROKEN_ADAPTERS

SHARES = {"batched": 0.6, "single": 0.2, "adapters": 0.2}
"""Shares of the time by how runs are made. A group of the first takes a second or two, of the last a minute."""
REAL = [
    (GPT, Precision.FP32),
    (GPT, Precision.BF16),
    (workload("gpt-mini-momentum"), Precision.FP32),
    (workload("vit-digits"), Precision.FP32),
]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One group of RESULTS/groups.jsonl."""

    version: int
    machine: str
    torch: str
    how: str
    """One of SHARES."""
    number: int
    """Number of the group, which settles its problem and seed."""
    seconds: float
    """Seconds that the group's process took."""
    group: Group


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.false_alarms", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no group after these (default: 60)")
    parser.add_argument("-k", default="", metavar="TEXT", help="problems whose case has TEXT in it, such as bf16")
    parser.add_argument("--processes", type=int, default=2, help="at once (default: 2)")
    parser.add_argument("--results", type=Path, default=Path("results/false-alarms"), help="folder that is added to")
    parser.add_argument("-o", "--output", type=Path, default=COUNTED)
    parsed = parser.parse_args(arguments)
    parsed.results.mkdir(parents=True, exist_ok=True)
    path = parsed.results / "groups.jsonl"
    path.touch()
    lines = read(path)
    shares = {how: share for how, share in SHARES.items() if any(parsed.k in case for case in _cases(how))}
    if not shares:
        parser.error(f"no problem has {parsed.k!r} in it; there are {', '.join(_cases('single'))}")
    for line in measure(lines, parsed.minutes * 60, parsed.processes, parsed.k, shares):
        with path.open("a") as file:
            file.write(json.dumps(encode(line)) + "\n")
        lines.append(line)
        group = line.group
        print(
            f"{max(group.excesses):.2f} {group.what} seed {group.seed}: {len(group.excesses)} runs in "
            f"{line.seconds:.1f} s, {group.worst}",
            flush=True,
        )
    found = count_alarms(lines)
    parsed.output.write_text(json.dumps(encode(found), indent=1) + "\n")
    print(f"{parsed.output}: {found}")
    return 1 if found.alarms > FALSE_ALARMS * found.runs else 0


def read(path: Path) -> list[Line]:
    """Return the lines of this version, without a last one that was cut off."""
    found = []
    for text in path.read_text().splitlines():
        try:
            line: Line = decode(Line, json.loads(text))
        except ValueError:
            continue
        found += [line] if line.version == FORMAT else []
    return found


def count_alarms(lines: Sequence[Line]) -> FalseAlarms:
    """Each group once."""
    once = {(line.how, line.number): line for line in lines}.values()
    groups = [line.group for line in once]
    return FalseAlarms(
        version=FORMAT,
        machines=sorted({line.machine for line in once}),
        torch=sorted({line.torch for line in once}),
        design_effect=round(design_effect([g.excesses for g in groups]), 3),
        counted=merged(
            [
                AlarmCounts(
                    what=g.what, problems=1, tolerance_models=g.tolerance_models, runs=len(g.excesses), alarms=g.alarms
                )
                for g in groups
            ]
        ),
    )


def measure(
    lines: Sequence[Line], seconds: float, processes: int, text: str, shares: Mapping[str, float]
) -> Iterator[Line]:
    """Groups that `lines` lack, of problems with `text` in them, as they end; the next is always of what has had least
    of its share of the time."""
    spent = {how: sum(line.seconds for line in lines if line.how == how) for how in shares}
    following = {how: _numbers(lines, how, text) for how in shares}
    deadline, context = time.monotonic() + seconds, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(os.getpid(),)) as pool:
        running: dict[Future[Line], str] = {}
        while True:
            while len(running) < processes and time.monotonic() < deadline:
                how = min(shares, key=lambda how: (how in running.values(), spent[how] / shares[how]))
                running[pool.submit(_one, how, next(following[how]))] = how
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                line, how = future.result(), running.pop(future)
                spent[how] += line.seconds
                yield line


def _begin(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)


def _cases(how: str) -> list[str]:
    """The problems of one of SHARES, in words; by number over and over."""
    if how == "adapters":
        return [f"{trained.id}-{precision}" for trained, precision in REAL]
    return [case.id for case in (SMALL if how == "batched" else PROBLEMS)]


def _numbers(lines: Sequence[Line], how: str, text: str) -> Iterator[int]:
    """Yield the numbers of the groups that are still to run."""
    done, cases = {line.number for line in lines if line.how == how}, _cases(how)
    return (n for n in itertools.count() if n not in done and text in cases[n % len(cases)])


def _one(how: str, number: int) -> Line:
    started = time.monotonic()
    if how == "batched":
        group = measure_batched(varied(SMALL[number % len(SMALL)], number))
    elif how == "single":
        group = measure_single(varied(PROBLEMS[number % len(PROBLEMS)], number))
    else:
        group = measure_adapters(number)
    return Line(
        version=FORMAT,
        machine=machine("cpu"),
        torch=torch.__version__,
        how=how,
        number=number,
        seconds=time.monotonic() - started,
        group=group,
    )


def measure_adapters(seed: int) -> Group:
    """Real adapters in their layouts, as many micro-batches of all ranks together in each; those that compute bit by
    bit what another computed count once."""
    trained, precision = REAL[seed % len(REAL)]
    problem, num_chunks = dataclasses.replace(trained, seed=seed), (2, 4, 8)[seed % 3]
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec()) as cluster:
        runner = Runner(ForkserverLauncher(cluster), builtin_adapters(), RunOptions(observed_steps=STEPS), Path(folder))
        for adapter, layout in BROKEN_ADAPTERS.items():
            own = dataclasses.replace(layout, num_micro_batches=num_chunks // layout.dp)
            name = adapter.partition("/")[0]
            case = Case(adapter=name, workload=under(adapter, problem), layout=own, precision=precision)
            if not runner.refusal(case):
                records.append(runner.observe(case))
        runner.close()
    judged = [r for r in records if r.outcome.status is Status.OK and r.verdict("equivalence") is not None]
    assert judged, [r.outcome.message for r in records]
    once = {bits(compare(r.equivalence.deviations)): r for r in judged}.values()
    excesses = [
        (max(r.equivalence.tolerance_model.excesses(compare(r.equivalence.deviations))), r.case.id) for r in once
    ]
    (_, quantity, step), case_id = max(excesses)
    return Group(
        what=f"adapters, {trained.id} {precision}",
        seed=seed,
        tolerance_models=1,
        excesses=[worst[0] for worst, _ in excesses],
        worst=f"{case_id}: {quantity}, step {step}",
        tails={},
    )


if __name__ == "__main__":
    sys.exit(main())
