"""What became of the faults, as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.campaign import Trial
from benchmarks.chaos.session import PATIENCE_SECONDS
from benchmarks.chaos.settings import PLAIN
from meshmark.environment import describe
from meshmark.report.markdown import table as markdown


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """What became of all faults."""

    trials: Sequence[Trial]
    unharmed: int
    resumed: int
    complaints: Sequence[str]
    sessions: int
    seed: int
    asked: int
    root: bool
    seconds: float

    @property
    def good(self) -> bool:
        return not self.complaints and all(trial.survived and trial.named for trial in self.trials)


def page(chaos: Chaos) -> str:
    """Return the page in Markdown."""
    here = describe("cpu", "gloo", 1, command=["make", "chaos"])
    trials, survived, named = chaos.trials, sum(t.survived for t in chaos.trials), sum(t.named for t in chaos.trials)
    where = (
        "; disks are tmpfs of their own, nodes are network namespaces."
        if chaos.root
        else "; without root, no disk was filled and no node or link was lost."
    )
    parts = [
        "# Chaos",
        f"**{survived} of {len(trials)} faults were survived, and {named} named rightly**, in {chaos.sessions} runs of "
        f"the suites. {chaos.unharmed} cases beside them, to which nothing was done, are correct. "
        f"{chaos.resumed} runs that a fault ended were completed by `--resume`. "
        f"{len(chaos.complaints)} complaints.",
        "## By fault",
        markdown(_rows(trials, "kind", "fault")),
        "*Survived*: pytest went on, or ended by itself where it had to. All that had begun has its record or its "
        "session's line. Cases before and after are correct. Nobody waited longer than "
        f"{PATIENCE_SECONDS:g} s beyond the case's limit ({PLAIN.limit_seconds:g} s and more). Neither a process, nor "
        "a temporary file, nor shared memory was left: every second case has ranks that start processes of their own, "
        "one in a session of its own. *Named rightly*: the record, or pytest's exit code and message, tell the fault "
        "and all ranks that were struck. *Seconds*: from the fault to the record, or, where it ends the run, until "
        "every process of it had ended. A rank that is stopped for ever is known at the case's limit.",
        "## By kind of run",
        markdown(_rows(trials, "setting", "run")),
        "Moments: *starting* is the first sight of all ranks, *done* a rank whose report is written and whose process "
        "still lives, *importing* before a case has ranks, *judging* while noise and verdicts are computed, *writing* "
        "the moment in which the file of records grows, *ending* after the last record. Otherwise a fault strikes at "
        "a time drawn by the seed while ranks run; one that comes too late is drawn again. After a fault that ends "
        "pytest the same command goes on with `--resume`, half of the time in two shards: no byte that was written "
        "changes, and every case has its record. Strangers reach node 0's port without the secret while two nodes "
        "run; all cases must be correct.",
        f"Made by `make chaos` (seed {chaos.seed}, {chaos.asked} faults asked for) on {here.machine}, {here.num_cpus} "
        f"CPUs, {here.system}, commit {here.commit}, {here.date[:10]}, in {chaos.seconds / 60:.0f} minutes. Cases are "
        "gpt-mini under ddp, fsdp2, gpipe, accelerate, fairscale-oss and downpour" + where,
    ]
    wrong = [f"{t.kind}, {t.case}: {t.complaint}" for t in trials if t.complaint] + list(chaos.complaints)
    if wrong:
        parts += ["## What was wrong", "\n".join(f"- {' '.join(text.split())[:600]}" for text in wrong)]
    return "\n\n".join(parts) + "\n"


def _rows(trials: Sequence[Trial], field: str, title: str) -> list[dict[str, object]]:
    rows = list[dict[str, object]]()
    for value in sorted({getattr(trial, field) for trial in trials}):
        mine = [trial for trial in trials if getattr(trial, field) == value]
        seconds = [trial.seconds for trial in mine]
        rows.append(
            {
                title: value,
                "tried": len(mine),
                "survived": sum(trial.survived for trial in mine),
                "named rightly": sum(trial.named for trial in mine),
                "seconds, median": f"{statistics.median(seconds):.2f}",
                "worst": f"{max(seconds):.2f}",
            }
        )
    return rows
