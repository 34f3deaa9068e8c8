"""Fails a run of the suites in which every case was skipped, and says why. Loaded by the plugin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshmark.pytest_plugin.selection import selection
from meshmark.spec.case import CHOOSE, Cell
from meshmark.text import pluralize

_REASONS = 3
"""Number of reasons printed per adapter."""
_SKIPPED = "Skipped: "
"""Prefix that pytest puts before the reason of a skip."""


@dataclass
class Skips:
    """Outcomes so far of the tests that have a case."""

    adapters: dict[str, str]
    """Adapter of each test that has a case."""
    ended: set[str] = field(default_factory=set)
    """Tests that have an outcome."""
    others: int = 0
    """Number of tests with another outcome than a skip."""
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    """By adapter: how many tests were skipped for each reason."""

    @property
    def are_all(self) -> bool:
        """True if every test of a case was skipped. A test that a time limit left out does not count as skipped."""
        return bool(self.adapters) and not self.others and self.ended == set(self.adapters)


_SKIPS = pytest.StashKey[Skips]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        session.config.stash[_SKIPS] = Skips({item.nodeid: name for item in session.items for name in _adapter(item)})
        session.config.pluginmanager.register(_Listener(session.config.stash[_SKIPS]))


def _adapter(item: pytest.Item) -> Iterator[str]:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    found = parameters.get("case") or parameters.get("conforming")
    if isinstance(found, Cell):
        yield found.adapter


class _Listener:
    """Collects reports, which pytest passes without their session."""

    def __init__(self, skips: Skips) -> None:
        self.skips = skips

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        adapter = self.skips.adapters.get(report.nodeid)
        if adapter is None:
            return
        if report.when == "call" or not report.passed:
            self.skips.ended.add(report.nodeid)
            if report.skipped and not hasattr(report, "wasxfail"):  # a known gap has been run
                self.skips.reasons.setdefault(adapter, Counter())[_reason(report)] += 1
            else:
                self.skips.others += 1


def _reason(report: pytest.TestReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return told.removeprefix(_SKIPPED).removesuffix(f"; {CHOOSE}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session before pytest prints its summary.

    Does nothing for a part of a run (`--shard`), which may contain only skips. Only the whole run shows whether
    anything ran.
    """
    if _fails(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _fails(config: pytest.Config) -> bool:
    skips = config.stash.get(_SKIPS, None)
    if skips is None or not skips.are_all:
        return False
    return not config.getoption("--allow-skipped") and selection(config).shard[1] == 1


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    skips = config.stash.get(_SKIPS, None)
    if skips is None or not skips.are_all:
        return
    fails = _fails(config)
    terminalreporter.section("every case was skipped: nothing was judged", red=fails, yellow=not fails)
    for adapter, reasons in skips.reasons.items():
        for reason, count in reasons.most_common(_REASONS):
            terminalreporter.write_line(f"{adapter}, {pluralize(count, 'test')}: {reason}")
        if more := sum(reasons.values()) - sum(count for _, count in reasons.most_common(_REASONS)):
            terminalreporter.write_line(f"{adapter}, {pluralize(more, 'test')}: other reasons (-rs shows them)")
    if fails:
        terminalreporter.write_line(
            f"This run shows nothing, so it fails. Install what is missing (`meshmark doctor` lists it), or {CHOOSE}"
            "; --allow-skipped lets it pass."
        )
