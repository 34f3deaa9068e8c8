"""The page of the faults and their outcomes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.campaign import Results, Trial
from benchmarks.chaos.settings import PLAIN
from meshmark.environment import Environment
from meshmark.report.table import table as markdown
from meshmark.serial import decode, encode


@dataclass(frozen=True, kw_only=True)
class CampaignStart:
    """How a series of faults was made: the first line of its file. The other lines are `Results`, one a session."""

    seed: int
    faults: int
    """How many were asked for."""
    root: bool
    environment: Environment
    limit_factor: float = 1.0
    """The time limits of cases are so many times those of a quiet machine."""


def write_line(file: Path, line: CampaignStart | Results) -> None:
    """Append a line to a file of a series."""
    with open(file, "a") as output:
        output.write(json.dumps(encode(line)) + "\n")


def read_series(files: Sequence[Path]) -> tuple[list[CampaignStart], list[Results]]:
    """Return how each series was made, and what became of all their sessions."""
    starts, sessions = list[CampaignStart](), list[Results]()
    for file in files:
        first, *lines = file.read_text().splitlines()
        starts.append(decode(CampaignStart, json.loads(first)))
        sessions += [decode(Results, json.loads(line)) for line in lines]
    return starts, sessions


def is_good(sessions: Sequence[Results]) -> bool:
    """Return whether every fault was survived and named rightly, and nothing else was wrong."""
    return all(not s.complaints and all(t.survived and t.named for t in s.trials) for s in sessions)


def page(starts: Sequence[CampaignStart], sessions: Sequence[Results]) -> str:
    """Return the page in Markdown."""
    trials = [trial for session in sessions for trial in session.trials]
    complaints = [complaint for session in sessions for complaint in session.complaints]
    survived, named = sum(t.survived for t in trials), sum(t.named for t in trials)
    unharmed, resumed = (sum(getattr(s, name) for s in sessions) for name in ("unharmed", "resumed"))
    made = "; ".join(
        f"seed {s.seed}, {s.faults} faults asked for, at commit {s.environment.commit} on {s.environment.date[:10]}, "
        f"{s.environment.machine}, {s.environment.num_cpus} CPUs, {s.environment.system}"
        + (f", time limits times {s.limit_factor:g}" if s.limit_factor != 1.0 else "")
        + ("" if s.root else ", without root, so that no disk was filled and no node or link was lost")
        for s in starts
    )
    parts = [
        "# Chaos",
        f"**{survived} of {len(trials)} faults were survived, and {named} named rightly**, in {len(sessions)} runs of "
        f"the suites. {unharmed} cases beside them, to which nothing was done, are correct. "
        f"{resumed} runs that a fault ended were completed by `--resume`. {len(complaints)} complaints.",
        "## By fault",
        markdown(_rows(trials, "kind", "fault")),
        "*Survived*: pytest went on, or ended by itself where it had to. All that had begun has its record or its "
        "session's line. Cases before and after are correct. Nobody waited longer than "
        f"{PLAIN.patience_seconds:g} s beyond the case's limit ({PLAIN.limit_seconds:g} s and more), both multiplied "
        "where the last line says so. Neither a process, nor a temporary file, nor shared memory was left: every "
        "second case has ranks that start processes of their own, one in a session of its own. *Named rightly*: the "
        "record, or pytest's exit code and message, tell the fault "
        "and a rank that was struck. *Seconds*: from the fault to the record, or, where it ends the run, until "
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
        f"Made by `make chaos`: {made}. Cases are gpt-mini under ddp, fsdp2, gpipe, accelerate, fairscale-oss and "
        "downpour; disks are tmpfs of their own, nodes are network namespaces.",
    ]
    wrong = [f"{t.kind}, {t.case}: {t.complaint}" for t in trials if t.complaint] + complaints
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
