"""Every system beside every capability: what the suites found, as a page; and the roster's adapters, broken on purpose.

Cells come from records that `make roster` leaves: none is declared. Where there is no record, the adapter's own refusal
of the layout says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.trials import Court, Trial
from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.finding import ClauseResult
from meshmark.environment import describe
from meshmark.errors import LayoutError
from meshmark.report.conformance import columns
from meshmark.report.markdown import table
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.forkserver_launcher import ForkserverLauncher
from meshmark.run.record import Record, Status
from meshmark.run.record_file import read_records
from meshmark.spec.case import Case
from meshmark.spec.layout import AXES, Schedule
from meshmark.spec.precision import Precision
from tests.broken.mutants import target
from tests.broken.roster import ROSTER_MUTANTS

SUITES = ("equivalence", "memory", "communication")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roster", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, metavar="DIR", help="records of the suites")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/roster.md"))
    parsed = parser.parse_args(arguments)
    records = read_records(parsed.results, latest=True).records
    adapters = {name: load_adapter(path) for name, path in builtin_adapters().items()}
    trials = try_mutants()
    parsed.output.write_text(page(records, adapters, trials))
    wrong = [r.case.id for r in records if not r.conformance.scenario and _verdict(r) not in ("yes", "–")]
    missed = [t.mutant.name for t in trials if not (t.caught and t.named)]
    told = ", ".join([*wrong, *missed]) or "nothing wrong, every mutant caught"
    print(f"{parsed.output}: {len(records)} records; {told}")
    return 1 if wrong or missed else 0


def try_mutants() -> list[Trial]:
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec()) as cluster:
        targets = {mutant.name: target(mutant.name) for mutant in ROSTER_MUTANTS}
        court = Court(ForkserverLauncher(cluster), targets, Path(folder))
        found = [court.attempt(mutant) for mutant in ROSTER_MUTANTS]
        court.close()
    return found


def capability(case: Case) -> str:
    """What a case shows of an adapter, in words of its layout: axes, stage, schedule, and the precision if it is not
    fp32."""
    layout = case.layout
    parts = [" x ".join(axis for axis in AXES if getattr(layout, axis) > 1) or "one rank"]
    parts += [f"zero{layout.zero_stage}"] if layout.zero_stage else []
    parts += [str(layout.schedule)] if layout.pp > 1 and layout.schedule is not Schedule.GPIPE else []
    parts += ["sp"] if layout.sequence_parallel else []
    parts += [f"offload {layout.offload}"] if layout.offload != "none" else []
    parts += [str(case.precision)] if case.precision is not Precision.FP32 else []
    return ", ".join(parts)


_INTRO = """Made by `make roster` on {machine}, {cpus} CPUs. A cell is *yes* where gradients, updates, memory and
traffic of every case of that capability are what they should be (memory and traffic where theory plans them), **no**
where one is not, and – where the adapter refuses it or was not run. The last column counts the clauses of conformance
that were asked."""
Notes = dict[str, list[str]]
"""Capabilities by the reason why they are no yes."""


def page(records: Sequence[Record], adapters: dict[str, type[Adapter]], trials: Sequence[Trial]) -> str:
    where, notes = describe("cpu", "gloo", 1), Notes()
    rows = [_row(name, adapter, records, notes) for name, adapter in adapters.items()]
    parts = [
        "# The roster: system by capability",
        _INTRO.format(machine=where.machine, cpus=where.num_cpus),
        table(rows),
        "## Why not",
        "\n".join(f"- {note} ({'; '.join(whats)})" for note, whats in notes.items()),
        "## Broken on purpose",
        table([_trial(trial) for trial in trials]),
    ]
    return "\n\n".join(parts) + "\n"


def _row(
    name: str, adapter: type[Adapter], records: Sequence[Record], notes: dict[str, list[str]]
) -> dict[str, object]:
    """One adapter's cells; the reasons of those that are no yes go into `notes`."""
    plain = [record for record in records if not record.conformance.scenario]
    examples = {capability(record.case): record.case for record in plain if record.outcome.status is not Status.SKIPPED}
    row: dict[str, object] = {"adapter": name, "track": adapter.track.value}
    for what, example in sorted(examples.items()):
        own = [record for record in plain if record.case.adapter == name and capability(record.case) == what]
        row[what], why = _cell(own, adapter, replace(example, adapter=name))
        if why:
            notes.setdefault(f"{name}: {why}", []).append(what)
    findings = [column.findings for column in columns(records) if column.base.adapter == name]
    row["clauses"] = _counts([finding.result for each in findings for finding in each.values()])
    return row


def _cell(own: Sequence[Record], adapter: type[Adapter], example: Case) -> tuple[str, str]:
    """Mark, and the reason of what is no yes."""
    ran = [record for record in own if record.outcome.status is not Status.SKIPPED]
    if not ran:
        reason = own[0].outcome.message if own else _refusal(adapter, example)
        return "–", reason.removeprefix(f"{example.adapter} does not support ")
    failing = [record for record in ran if _verdict(record) != "yes"]
    if not failing:
        return "yes", ""
    return "**no**", f"{failing[0].case.layout.id}: {_verdict(failing[0])}"


def _refusal(adapter: type[Adapter], example: Case) -> str:
    try:
        return adapter.refusal(example, "cpu", "gloo") or "not run"
    except LayoutError as error:
        return str(error)


def _verdict(record: Record) -> str:
    """`yes`, or what is wrong with it."""
    if record.outcome.status is Status.SKIPPED:
        return "–"
    if record.outcome.status is not Status.OK:
        return f"{record.outcome.status}: {record.outcome.message.splitlines()[0] if record.outcome.message else ''}"
    return next((f"{v.suite}: {v.summary}" for v in record.verdicts if v.suite in SUITES and not v.passed), "yes")


def _counts(found: Sequence[ClauseResult]) -> str:
    marks = {
        "yes": (ClauseResult.PASS, ClauseResult.TOLD),
        "gap": (ClauseResult.KNOWN_GAP, ClauseResult.STALE_GAP),
        "**no**": (ClauseResult.FAIL, ClauseResult.UNDECIDED),
        "–": (ClauseResult.UNSUPPORTED,),
    }
    counts = {mark: sum(result in results for result in found) for mark, results in marks.items()}
    return ", ".join(f"{count} {mark}" for mark, count in counts.items() if count) or "not run"


def _trial(trial: Trial) -> dict[str, object]:
    return {
        "adapter": trial.mutant.adapter,
        "defect": (trial.mutant.defect.__doc__ or "").partition("\n")[0],
        "caught by": trial.mutant.suite if trial.caught else "**not caught**",
        "told as": trial.told.splitlines()[0][:160] if trial.named else f"**{trial.told[:160]}**",
    }


if __name__ == "__main__":
    sys.exit(main())
