"""What it takes to judge a model of the size that people run: wall time, CPU time and memory of the equivalence suite
with all of its processes, adapter by adapter. `make size` holds gpt2-124m on two CPU ranks to what is claimed of it,
and mutants, which must fail there too.

    python -m benchmarks.size --adapters ddp,fsdp2,ddp_normgradient_off_by_0p001

Memory is the sum of proportional set sizes (a page that processes share is counted once) over an adapter's processes,
sampled while they run. Time is the machine's own: on one that does other work too, CPU seconds say more. Results are
kept, so that the page can be made in pieces.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.size_page import page
from meshmark.adapter.registry import outside_name
from meshmark.cli.options import chosen_adapters
from meshmark.environment import machine
from meshmark.judge.deviation import unsampled
from meshmark.records.record import Record, Status
from meshmark.records.record_file import read_records
from meshmark.records.request import Task
from meshmark.report.kept_page import keep_page
from tests.broken.mutants import sized, target

MOST_SECONDS = 600.0
"""Most seconds of one case's launch on a quiet machine, and of the noise that judges several cases."""
MOST_BYTES = 12 * 2**30
_WRONG = (target(sized("ddp", "NormGradient", 1e-3)), target(sized("ddp", "AllGradients", 1e-4)))
MUTANTS = {outside_name(mutant): mutant for mutant in _WRONG}
"""By a factor on one norm's gradient, and on every gradient."""
_ONE_RANK = "single"
_ALL = {name: name in MUTANTS for name in (*chosen_adapters(None, []), *MUTANTS) if name != _ONE_RANK}
"""The report's, and the mutants: whether each is wrong on purpose."""
_SUITE = ["-m", "pytest", "suites/test_equivalence.py", "-p", "no:cacheprovider", "-q", "-rs"]
_WORKLOAD = ["--workload", "gpt2-124m", "--global-batch", "4"]
_MODEL = "layers=12,hidden=768,heads=12,vocab={vocab},seq_len=128,tied_embeddings=true"
KNOWN_GAPS = {"fairscale-fsdp": "it clips by the norm of flat tensors (adapters/gaps/vector_norm_large.py)"}
"""By adapter, why it is wrong at this size."""
_VOCAB, _PADDED = 50257, {"megatron": 50304}
"""GPT-2's tokens; and of what deals rows of the embedding out in equal parts, padded as its trainer does."""
_COSTS = "costs.json"
_EVERY = 2.0
"""Seconds between looks at memory."""
_NO_TESTS = 5
"""pytest's exit code where an adapter has no case of so many ranks."""


@dataclass(kw_only=True)
class Cost:
    """Cost of a run with all its processes."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    load: float = 0.0
    """Processes that wanted a core at the same time, in the mean; its own are some two of them."""


def measured(command: list[str]) -> tuple[int, Cost]:
    """The exit code of a command, and what it took."""
    cost, started, cpu_seconds = Cost(), time.monotonic(), dict[int, float]()
    loads, process = list[float](), subprocess.Popen(command)
    while process.poll() is None:
        family = _family(process.pid)
        cost.peak_bytes = max(cost.peak_bytes, sum(map(_pss, family)))
        cpu_seconds |= {pid: told for pid in family if (told := _cpu_seconds(pid)) is not None}
        loads.append(os.getloadavg()[0])
        time.sleep(_EVERY)
    cost.load = sum(loads) / max(len(loads), 1)
    cost.seconds = time.monotonic() - started
    cost.cpu_seconds = sum(cpu_seconds.values())  # a parent that nobody waits for hands no child's on
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


def _cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds of a process without its children, or None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def complaints(records: Sequence[Record], costs: dict[str, Cost]) -> list[str]:
    """Return the claims that do not hold."""
    found = []
    for record in records:
        verdict, broken = record.verdict("equivalence"), record.case.adapter in (MUTANTS | KNOWN_GAPS)
        if record.outcome.status is Status.SKIPPED or (verdict is None and unsampled(record.case)):
            continue
        if verdict is None or verdict.undecided or (not verdict.passed and not broken):
            why = verdict.summary if verdict else f"{record.outcome.status}: {record.outcome.message}"
            found.append(f"{record.case.id}: {why}")
        elif verdict.passed and broken:
            found.append(f"{record.case.id}: what is wrong was taken for right: {verdict.summary}")
        if record.launch.seconds > MOST_SECONDS:
            found.append(f"{record.case.id} took {record.launch.seconds:.0f} s, where {MOST_SECONDS:.0f} are claimed")
    if not any(record.verdict("equivalence") for record in records):
        found.append("nothing was judged")
    most = f"where {MOST_BYTES / 2**30:.0f} are claimed"
    large = {name: cost.peak_bytes / 2**30 for name, cost in costs.items() if cost.peak_bytes > MOST_BYTES}
    return found + [f"{name}: a peak of {peak:.1f} GiB, {most}" for name, peak in large.items()]


def _kept(results: Path) -> dict[str, Cost]:
    path = results / _COSTS
    return {name: Cost(**cost) for name, cost in json.loads(path.read_text()).items()} if path.exists() else {}


def _observed(results: Path) -> list[Record]:
    """The last of each case."""
    records = read_records(results, latest=True).records if (results / "records.jsonl").exists() else []
    return [r for r in records if r.task is Task.OBSERVE and r.outcome.status is not Status.SKIPPED]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", help="names, or mutants' (default: the report's, and the mutants)")
    parser.add_argument("--world", default="2")
    parser.add_argument("--time-limit", default="180", help="as the suites take it; ten times that where it is sampled")
    parser.add_argument("--results", default="results/size", type=Path)
    parser.add_argument("--output", default="results/size/size.md", type=Path)
    asked = parser.parse_args()
    names = asked.adapters.split(",") if asked.adapters else list(_ALL)
    limits = ["--world", asked.world, "--time-limit", asked.time_limit, "--results", str(asked.results)]
    failed = list[str]()
    for name in names:
        exact = f"[{name[0]}]{name[1:]}"  # the name alone would stand for a family, such as Accelerate's
        adapter = ["--adapter", MUTANTS[name]] if name in MUTANTS else ["--adapters", exact]
        model = _MODEL.format(vocab=_PADDED.get(name, _VOCAB))
        code, cost = measured([sys.executable, *_SUITE, *_WORKLOAD, "--model", model, *adapter, *limits])
        wrong = name in MUTANTS or name in KNOWN_GAPS
        failed += [f"{name}: pytest ended with {code}"] if code not in (0, _NO_TESTS) and not wrong else []
        costs = _kept(asked.results) | ({name: cost} if code != _NO_TESTS else {})
        asked.results.mkdir(parents=True, exist_ok=True)
        (asked.results / _COSTS).write_text(json.dumps({n: dataclasses.asdict(c) for n, c in costs.items()}))
    records, costs = _observed(asked.results), _kept(asked.results)
    keep_page(page(records, costs, _ALL, KNOWN_GAPS, f"{os.cpu_count()} x {machine('cpu')}"), asked.output)
    found = failed + complaints(
        [r for r in records if r.case.adapter in names], {n: costs[n] for n in names if n in costs}
    )
    print("\n".join(found) or f"all as claimed: {asked.output}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
