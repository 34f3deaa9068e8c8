"""What a run says where GitHub Actions runs it: an annotation a failure, and a summary. Loaded by the plugin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshmark.report.markdown import block, code, inline, one_line
from meshmark.run.session import Attempt, Ending
from meshmark.session_log import ATTEMPTS

_MOST = 10
"""Annotations that GitHub shows of one step."""
_CHARACTERS = 500


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    attempts = list(config.stash.get(ATTEMPTS, {}).values())
    if not attempts or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for line in annotation_lines(attempts):
        terminalreporter.write_line(line)
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
