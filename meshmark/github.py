"""Tells GitHub Actions of the tests of a session. Loaded by the plugin."""

from __future__ import annotations

from typing import Any

import pytest

from meshmark.report.github import tell_github
from meshmark.session_log import ATTEMPTS


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    tell_github(list(config.stash.get(ATTEMPTS, {}).values()), terminalreporter.write_line)
