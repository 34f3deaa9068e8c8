"""What GitHub Actions is told where it runs us: an annotation a failure, and a summary of the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from meshmark.report.markdown import block, code, inline, one_line
from meshmark.run.session import Attempt, Ending

_MOST = 10
"""Annotations that GitHub shows of one step."""
_CHARACTERS = 500


def tell_github(attempts: Sequence[Attempt], write: Callable[[str], object]) -> None:
    """Nothing elsewhere. `write` prints a line."""
    if not attempts or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for line in annotation_lines(attempts):
        write(line)
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(file).open("a", encoding="utf-8") as summary:
            summary.write(step_summary(attempts))


def annotation_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Workflow commands, which end with their line: nothing in a message begins another."""
    failed = [attempt for attempt in attempts if attempt.ending is Ending.FAILED]
    return [
        f"::error title={_property(attempt.test)}::{_data(f'{attempt.message[:_CHARACTERS]} Again: {attempt.command}')}"
        for attempt in failed[:_MOST]
    ]


def _data(text: str) -> str:
    return one_line(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def step_summary(attempts: Sequence[Attempt]) -> str:
    """Markdown of the job's page."""
    counts = {ending: sum(attempt.ending is ending for attempt in attempts) for ending in Ending}
    told = ", ".join(f"{count} {ending}" for ending, count in counts.items() if count)
    parts = ["## Meshmark", f"{told}."]
    if failed := [attempt for attempt in attempts if attempt.ending is Ending.FAILED]:
        parts.append("\n".join(f"- {code(a.test)}: {inline(one_line(a.message), _CHARACTERS)}" for a in failed))
        parts += ["Again, one at a time, by:", block("\n".join(attempt.command for attempt in failed))]
    return "\n\n".join(parts) + "\n"
