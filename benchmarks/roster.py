"""Every system beside every capability: what the suites found, as a page; and the roster's adapters, broken on purpose.

Cells come from records that `make roster` leaves: none is declared. Where there is no record, the adapter's own refusal
of the layout says why. Records of mutants stay in DIR/mutants, and on a clean commit none is tried twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.roster_page import page, wrong
from benchmarks.trials import Court, Trial
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.environment import describe
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.forkserver_launcher import ForkserverLauncher
from meshmark.run.record import Record
from meshmark.run.record_file import read_records
from meshmark.run.resume import Held
from tests.broken.mutants import target
from tests.broken.roster import ROSTER_MUTANTS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roster", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, metavar="DIR", help="records of the suites")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/roster.md"))
    parser.add_argument(
        "-k", default="", metavar="TEXT,...", help="mutants whose name contains one of these, as adapters' do"
    )
    parser.add_argument(
        "--no-mutants", action="store_true", help="try none: the page of records that are there, of mutants too"
    )
    parsed = parser.parse_args(arguments)
    records = read_records(parsed.results, latest=True).records
    adapters = {name: load_adapter(path) for name, path in builtin_adapters().items()}
    if not parsed.no_mutants:
        texts = parsed.k.replace("-", "_").split(",")
        names = [m.name for m in ROSTER_MUTANTS if any(text in m.name for text in texts)]
        if not names:
            parser.error(
                f"-k {parsed.k}: no mutant is called so, expected part of a name such as {ROSTER_MUTANTS[0].name}"
            )
        try_mutants([name for name in names if not skipped(name)], parsed.results / "mutants")
    trials = tried(parsed.results / "mutants")
    where = describe("cpu", "gloo", 1)
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    parsed.output.write_text(page(records, adapters, trials, f"{where.machine}, {where.num_cpus} CPUs"))
    failing = [r.case.id for r in records if not r.conformance.scenario and wrong(r)]
    missed = [t.mutant.name for t in trials if not (t.caught and t.named)]
    told = ", ".join([*failing, *missed]) or "nothing wrong, every mutant caught"
    print(f"{parsed.output}: {len(records)} records, {len(trials)} mutants; {told}")
    return 1 if failing or missed else 0


def skipped(name: str) -> bool:
    """Whether the adapter of the mutant of that name cannot run here, which is told."""
    mutant = next(m for m in ROSTER_MUTANTS if m.name == name)
    adapter = load_adapter(builtin_adapters()[mutant.adapter.partition("/")[0]])
    if reason := adapter.refusal(mutant.case, "cpu", "gloo"):
        print(f"{'skipped':<8} {name:<50} {reason}", flush=True)
    return reason is not None


def tried(folder: Path) -> list[Trial]:
    """What `folder` holds of the mutants that there are."""
    found = {record.case: record for record in _records(folder)}
    return [Trial(mutant=mutant, record=found[mutant.case]) for mutant in ROSTER_MUTANTS if mutant.case in found]


def _records(folder: Path) -> list[Record]:
    return read_records(folder, latest=True).records if (folder / "records.jsonl").exists() else []


def try_mutants(names: Sequence[str], folder: Path) -> None:
    """Each is told as it comes, and its record is in `folder` from then on."""
    held = Held(_records(folder))
    with Cluster(ClusterSpec()) as cluster:
        court = Court(ForkserverLauncher(cluster), {name: target(name) for name in names}, folder, held)
        for mutant in (m for m in ROSTER_MUTANTS if m.name in names):
            trial = court.attempt(mutant)
            print(f"{'caught' if trial.caught else 'SURVIVED':<8} {mutant.name:<50} {trial.told[:200]}", flush=True)
        court.close()


if __name__ == "__main__":
    sys.exit(main())
