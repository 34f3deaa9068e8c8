"""`make roster`: every adapter by every capability, and every adapter broken on purpose; leaves reports/roster.md.

First come the suites of roster.toml, then adapters that do not train synchronously, then the mutants, and last the
clauses of roster_clauses.toml. Records stay in results/roster. On the same commit, without changes, `make roster` goes
on where it was cut off. `--page` runs nothing and writes the page of the records that are there. A cell of the page
comes from a record; where there is none, the adapter's own refusal of the layout says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.roster_page import page, wrong
from benchmarks.trials import MutantRunner, Trial
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.suite_file import run_file, run_pytest
from meshmark.environment import describe
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.report.kept_page import keep_page
from meshmark.run.resume import KeptRecords
from meshmark.spec.algorithm import SYNCHRONOUS
from tests.broken.mutant import algorithm_of
from tests.broken.mutants import target
from tests.broken.roster import ROSTER_MUTANTS

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roster", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--results", type=Path, default=Path("results/roster"), metavar="DIR", help="where records stay"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/roster.md"))
    parser.add_argument("-k", default="", metavar="TEXT,...", help="try only mutants whose name contains one of these")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page of the records that are there")
    parsed = parser.parse_args(arguments)
    texts = parsed.k.replace("-", "_").split(",")
    names = [m.name for m in ROSTER_MUTANTS if any(text in m.name for text in texts)]
    if not names:
        parser.error(f"-k {parsed.k}: no mutant is called so, expected part of a name such as {ROSTER_MUTANTS[0].name}")
    codes = []
    try:
        if not parsed.page:
            codes.append(run_file(HERE / "roster.toml", [f"--results={parsed.results}"]))
            codes.append(run_pytest(algorithm_run(parsed.results)))
            try_mutants([name for name in names if not skipped(name)], parsed.results / "mutants")
            codes.append(run_file(HERE / "roster_clauses.toml", [f"--results={parsed.results}"]))
    finally:
        codes.append(write_page(parsed.results, parsed.output))
    return max(map(bool, codes))


def algorithm_run(results: Path) -> list[str]:
    """Return pytest's words for the adapters that do not train synchronously, and an algorithm of each."""
    algorithms = {name: algorithm_of(name) for name in builtin_adapters()}
    ids = {name: algorithm.id for name, algorithm in algorithms.items() if algorithm is not SYNCHRONOUS}
    workloads = ",".join(dict.fromkeys(f"gpt-mini-sgd-{id}" for id in ids.values()))
    suites = [f"suites/test_{suite}.py" for suite in ("equivalence", "memory", "communication")]
    words = ["--adapters", ",".join(ids), "--workload", workloads, "--world", "2,4"]
    return [*suites, *words, f"--results={results}", "--resume"]


def write_page(results: Path, output: Path) -> int:
    """Write the page of the records in `results`. Returns 1 where one of them is wrong or a mutant was missed."""
    records = read_records(results, latest=True).records
    adapters = {name: load_adapter(path) for name, path in builtin_adapters().items()}
    trials = tried(results / "mutants")
    where = describe("cpu", "gloo", 1)
    keep_page(page(records, adapters, trials, f"{where.machine}, {where.num_cpus} CPUs"), output)
    failing = [r.case.id for r in records if not r.conformance.scenario and wrong(r)]
    missed = [t.mutant.name for t in trials if not (t.caught and t.named)]
    result = ", ".join([*failing, *missed]) or "nothing wrong, every mutant caught"
    print(f"{output}: {len(records)} records, {len(trials)} mutants; {result}")
    return 1 if failing or missed else 0


def skipped(name: str) -> bool:
    """Whether the adapter of the mutant of that name cannot run here, which is told."""
    mutant = next(m for m in ROSTER_MUTANTS if m.name == name)
    adapter = load_adapter(builtin_adapters()[mutant.adapter.partition("/")[0]])
    if reason := adapter.refusal(mutant.case, "cpu", "gloo"):
        print(f"{'skipped':<8} {name:<50} {reason}", flush=True)
    return reason is not None


def tried(folder: Path) -> list[Trial]:
    """Return the trials of existing mutants that `folder` holds."""
    found = {record.case: record for record in _records(folder)}
    return [Trial(mutant=mutant, record=found[mutant.case]) for mutant in ROSTER_MUTANTS if mutant.case in found]


def _records(folder: Path) -> list[Record]:
    return read_records(folder, latest=True).records if (folder / "records.jsonl").exists() else []


def try_mutants(names: Sequence[str], folder: Path) -> None:
    """Each is told as it comes, and its record is in `folder` from then on."""
    held = KeptRecords(_records(folder))
    with Cluster(ClusterSpec()) as cluster:
        mutant_runner = MutantRunner(ForkserverLauncher(cluster), {name: target(name) for name in names}, folder, held)
        for mutant in (m for m in ROSTER_MUTANTS if m.name in names):
            trial = mutant_runner.attempt(mutant)
            print(
                f"{'caught' if trial.caught else 'SURVIVED':<8} {mutant.name:<50} {trial.explanation[:200]}", flush=True
            )
        mutant_runner.close()


if __name__ == "__main__":
    sys.exit(main())
