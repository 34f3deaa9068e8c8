"""Output for GitHub Actions: an annotation per failure, and a summary of the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from meshmark.records.record_file import Attempt, Ending, by_defect
from meshmark.report.missing_failures import failure_line
from meshmark.report.table import block, one_line

_MOST = 10
"""Number of annotations that GitHub shows per step."""
_CHARACTERS = 500


def report_to_github(
    attempts: Sequence[Attempt], write: Callable[[str], object], annotated: Sequence[Attempt] | None = None
) -> None:
    """Report to GitHub Actions, and do nothing elsewhere.

    `write` prints a line. `annotated` is the attempts that other annotations do not cover yet.
    """
    if not attempts or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for line in annotation_lines(attempts if annotated is None else annotated):
        write(line)
    _add_to_summary(step_summary(attempts), write)


def warn_github(unsure: Sequence[str], write: Callable[[str], object]) -> None:
    """Report what a gate cannot decide, in one annotation and on the job's page. Does nothing elsewhere."""
    if not unsure or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    first, more = unsure[0][:_CHARACTERS], f" And {len(unsure) - 1} more." if len(unsure) > 1 else ""
    write(f"::warning title=Meshmark cannot tell::{_data(f'{first}{more}')}")
    text = "\n\n".join(["## Meshmark cannot tell", block("\n".join(map(one_line, unsure)))]) + "\n"
    _add_to_summary(text, write)


def _add_to_summary(text: str, write: Callable[[str], object]) -> None:
    """Add to the job's page. Where that cannot be written, a warning says so: it changes no verdict."""
    if not (file := os.environ.get("GITHUB_STEP_SUMMARY")):
        return
    try:
        with Path(file).open("a", encoding="utf-8") as summary:
            summary.write(text)
    except OSError as error:
        write(f"::warning title=Meshmark::{_data(f'the job summary {file!r} cannot be written: {error.strerror}')}")


def annotation_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Return one workflow command per defect. A command ends with its line, so messages cannot start another one."""
    return [_annotation(*same) for same in by_defect(attempts)[:_MOST]]


def _annotation(one: Attempt, *others: Attempt) -> str:
    also = f" The same: {', '.join(other.test for other in others)}." if others else ""
    told = f"{one.message[:_CHARACTERS]}{also} Again: {one.command}"
    return f"::error title={_property(one.test)}::{_data(told)}"


def _data(text: str) -> str:
    return one_line(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def step_summary(attempts: Sequence[Attempt]) -> str:
    """Return the Markdown of the job's page."""
    counts = {ending: sum(attempt.ending is ending for attempt in attempts) for ending in Ending}
    told = ", ".join(f"{count} {ending}" for ending, count in counts.items() if count)
    parts = ["## Meshmark", f"{told}."]
    if failed := by_defect(attempts):
        parts.append("\n".join(failure_line(*same, told=one_line(same[0].message)) for same in failed))
        parts += ["Again, one at a time, by:", block("\n".join(one.command for one, *_ in failed))]
    return "\n\n".join(parts) + "\n"
