"""What became of the faults, as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.campaign import Trial
from benchmarks.chaos.session import LIMIT_SECONDS, PATIENCE_SECONDS
from meshmark.environment import describe
from meshmark.report.markdown import table as markdown


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """All that was found."""

    trials: Sequence[Trial]
    unharmed: int
    complaints: Sequence[str]
    sessions: int
    seed: int
    asked: int
    root: bool
    seconds: float

    @property
    def good(self) -> bool:
        return not self.complaints and all(trial.survived and trial.named for trial in self.trials)


def page(found: Chaos) -> str:
    here = describe("cpu", "gloo", 1, command=["make", "chaos"])
    trials, survived, named = found.trials, sum(t.survived for t in found.trials), sum(t.named for t in found.trials)
    parts = [
        "# Chaos",
        f"{len(trials)} faults in {found.sessions} runs of the suites; {survived} survived, {named} named rightly; "
        f"{found.unharmed} cases beside them that nothing was done to; {len(found.complaints)} complaints.",
        markdown(_rows(trials)),
        "*Survived*: pytest went on, or ended by itself where it had to; all that had begun has its record or its "
        "session's line, cases before and after are correct, nobody waited longer than "
        f"{PATIENCE_SECONDS:g} s beyond the case's limit ({LIMIT_SECONDS['throughput']:g} s), and neither process nor "
        "a temporary file nor shared memory was left. *Named rightly*: the record, or pytest's exit code and message, "
        "tell the fault and the rank. *Seconds*: from the fault to the record, or, where it ends the run, until every "
        "process of it had ended; a rank that is stopped for ever is known at the case's limit.",
        f"Made by `make chaos` (seed {found.seed}, {found.asked} faults asked for) on {here.machine}, {here.num_cpus} "
        f"CPUs, {here.system}, commit {here.commit}, {here.date[:10]}, in {found.seconds / 60:.0f} minutes. Every "
        "fault strikes at a time drawn by the seed while the case's ranks run; one that comes when its rank has "
        "already reported is drawn again. Cases are gpt-mini under ddp, fsdp2, gpipe, accelerate and fairscale-oss "
        "on two ranks, of the suites throughput and equivalence"
        + (
            "; disks are tmpfs of their own, nodes are network namespaces."
            if found.root
            else "; without root, no disk was filled and no node or link was lost."
        ),
    ]
    wrong = [f"{t.kind}, {t.case}: {t.complaint}" for t in trials if t.complaint] + list(found.complaints)
    if wrong:
        parts += ["## What was wrong", "\n".join(f"- {' '.join(text.split())[:600]}" for text in wrong)]
    return "\n\n".join(parts) + "\n"


def _rows(trials: Sequence[Trial]) -> list[dict[str, object]]:
    rows = list[dict[str, object]]()
    for kind in sorted({trial.kind for trial in trials}):
        mine = [trial for trial in trials if trial.kind == kind]
        seconds = [trial.seconds for trial in mine]
        rows.append(
            {
                "fault": kind,
                "tried": len(mine),
                "survived": sum(trial.survived for trial in mine),
                "named rightly": sum(trial.named for trial in mine),
                "seconds, median": f"{statistics.median(seconds):.2f}",
                "worst": f"{max(seconds):.2f}",
            }
        )
    return rows
