"""What it takes to judge a model of the size that people run: wall time, CPU time and memory of the whole equivalence
suite, with all of its processes. `make size` holds gpt2-124m on two CPU ranks to what is claimed of it.

    python -m benchmarks.size --adapters ddp,fsdp2

Memory is the sum of proportional set sizes (a page that processes share is counted once) over this process's children,
sampled while they run. Time is the machine's own: on one that does other work too, CPU seconds say more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from meshmark.run.record import Record, Status
from meshmark.run.record_file import read_records
from meshmark.run.request import Task

MOST_SECONDS = 600.0
"""Of one adapter's launch, on a quiet machine; and of the noise that all are judged by."""
MOST_BYTES = 12 * 2**30
_SUITE = ["-m", "pytest", "suites/test_equivalence.py", "-p", "no:cacheprovider", "-q", "-rs"]
_WORKLOAD = ["--workload", "gpt2-124m", "--global-batch", "4"]
_MODEL = "layers=12,hidden=768,heads=12,vocab=50257,seq_len=128,tied_embeddings=true"
_EVERY = 2.0
"""Seconds between looks at memory."""


@dataclass(kw_only=True)
class Cost:
    """Of a run and all its processes."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


def measured(command: list[str]) -> tuple[int, Cost]:
    """The exit code of a command, and what it took."""
    cost, started, before = Cost(), time.monotonic(), os.times()
    process = subprocess.Popen(command)
    while process.poll() is None:
        cost.peak_bytes = max(cost.peak_bytes, sum(map(_pss, _family(process.pid))))
        time.sleep(_EVERY)
    after = os.times()
    cost.seconds = time.monotonic() - started
    cost.cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return process.returncode, cost


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def complaints(records: list[Record], cost: Cost) -> list[str]:
    """What was claimed and does not hold."""
    found = []
    for record in records:
        verdict = record.verdict("equivalence")
        if record.outcome.status is Status.SKIPPED:
            continue
        if verdict is None or not verdict.passed:
            why = verdict.summary if verdict else f"{record.outcome.status}: {record.outcome.message}"
            found.append(f"{record.case.id}: {why}")
        if record.launch.seconds > MOST_SECONDS:
            found.append(f"{record.case.id} took {record.launch.seconds:.0f} s, where {MOST_SECONDS:.0f} are claimed")
    if not any(record.verdict("equivalence") for record in records):
        found.append("nothing was judged")
    if cost.peak_bytes > MOST_BYTES:
        found.append(f"a peak of {cost.peak_bytes / 2**30:.1f} GiB, where {MOST_BYTES / 2**30:.0f} are claimed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", help="names or patterns, as the suites take them (default: the report's)")
    parser.add_argument("--world", default="2")
    parser.add_argument("--time-limit", default="180", help="as the suites take it; ten times that where it is sampled")
    parser.add_argument("--results", default="results/size", type=Path)
    asked = parser.parse_args()
    adapters = ["--adapters", asked.adapters] if asked.adapters else []
    chosen = [*adapters, "--world", asked.world, "--time-limit", asked.time_limit]
    command = [sys.executable, *_SUITE, *_WORKLOAD, "--model", _MODEL, *chosen, "--results", str(asked.results)]
    code, cost = measured(command)
    records = [r for r in read_records(asked.results, latest=True).records if r.task is Task.OBSERVE]
    for record in records:
        verdict, e = record.verdict("equivalence"), record.equivalence
        told = f"{verdict.summary}, sees from {verdict.evidence['detection_limit']:.3g}" if verdict else "not judged"
        print(f"{record.case.id}: {record.launch.seconds:.0f} s, {e.sample.text if e.sample else 'in full'}: {told}")
    print(f"{cost.seconds:.0f} s, {cost.cpu_seconds:.0f} CPU seconds, peak {cost.peak_bytes / 2**30:.2f} GiB in all")
    wrong = complaints(records, cost)
    print("\n".join(wrong))
    return code or bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
