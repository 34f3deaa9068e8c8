"""Reports the tests of a session to GitHub Actions. Loaded by the plugin."""

from __future__ import annotations

from typing import Any

import pytest

from meshmark.pytest_plugin.session_log import ATTEMPTS
from meshmark.report.github import report_to_github, warn_github

_UNSURE = "UnsureWarning: "
"""Prefix of what a gate cannot decide, among pytest's warnings."""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    warnings = [report.message for report in terminalreporter.stats.get("warnings", ())]
    unsure = [text.partition(_UNSURE)[2].partition("\n")[0] for text in warnings if _UNSURE in text]
    warn_github(unsure, terminalreporter.write_line)
    report_to_github(list(config.stash.get(ATTEMPTS, {}).values()), terminalreporter.write_line)
