"""The page of the trials and their outcomes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.cluster.row import Row, Whole
from benchmarks.cluster.trial import END_SECONDS
from meshmark.environment import describe
from meshmark.report.table import table as markdown

_WIDTH = 42
"""So that a row stays one."""


def page(rows: Sequence[Row], whole: Whole | None = None) -> str:
    here = describe("cpu", "gloo", 1, command=["make", "cluster-test"])
    good = sum(not row.wrong for row in rows)
    parts = [
        "# Clusters",
        f"{len(rows)} trials of the suites under real schedulers on one machine; {good} went as they should.",
        markdown([_cells(row) for row in rows]),
        "*Seconds*: without a fault, what the run took; else from the fault until it was noticed: until no process of "
        "the job was left on either node, or, where a node or a link is gone, until the survivor's record named it; "
        "of a mistake, from the command to its end. "
        "*Lost*: records that were made and are not there; of torchft, steps. Where a run was ended and went on, every "
        "case has one good record: what was complete was kept, what was in flight ran again, and no process outlived "
        f"{END_SECONDS:.0f} s.",
        f"{_made(rows, whole)} On {here.machine}, {here.num_cpus} CPUs that others used too, {here.system}. SLURM is "
        "the distribution's, its nodes are two daemons of this machine: on its loopback device, then each in a network "
        "namespace, joined by one link.",
    ]
    if wrong := [f"{row.engine}, {row.shape}, {row.fault}: {text}" for row in rows for text in row.wrong]:
        parts += ["## What was wrong", "\n".join(f"- {' '.join(text.split())[:600]}" for text in wrong)]
    return "\n\n".join(parts) + "\n"


def _made(rows: Sequence[Row], whole: Whole | None) -> str:
    """When, and in how many goes."""
    later = [row for row in rows if whole is None or row.date > whole.end or row.commit != whole.commit]
    told = []
    if whole:
        told.append(f"`make cluster-test`, {whole.trials} trials in one go of {whole.seconds / 60:.0f} minutes,")
        told.append(f"of {_span([row for row in rows if row not in later])}.")
    if later:
        names = f" ({'; '.join(row.fault for row in later)})" if whole else ""
        told.append(f"In pieces (`python -m benchmarks.cluster -k NAME`){names}, of {_span(later)}.")
    return " ".join(told)


def _span(rows: Sequence[Row]) -> str:
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    dates = sorted({row.date[:16].replace("T", " ") for row in rows if row.date})
    when = f"{dates[0]} to {dates[-1]} UTC" if dates else "no known time"
    return f"{commits}, from {when}"


def _cells(row: Row) -> dict[str, object]:
    return {
        "started by": row.engine,
        "nodes x tasks x ranks": row.shape,
        "fault": row.fault,
        "seconds": "" if row.seconds is None else f"{row.seconds:.1f}",
        "what was told": "**wrong**" if row.wrong else textwrap.shorten(row.told, _WIDTH, placeholder=" ..."),
        "lost": row.lost,
    }
