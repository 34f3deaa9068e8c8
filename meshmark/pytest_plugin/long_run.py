"""`--max-time`: end a run in good order when its time is up. Loaded by the plugin."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshmark.pytest_plugin.selection import selection
from meshmark.spec.case import Case
from meshmark.text import pluralize

_NAMED = 20
_BEGUN = pytest.StashKey[float]()
_UP = pytest.StashKey[bool]()
"""Set when the time is up."""
_LEFT = pytest.StashKey[dict[str, None]]()
"""Tests that have not ended."""


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEGUN] = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put one case of each adapter first if time may run out, so that all adapters are covered."""
    if config.getoption("--max-time") is None:
        return
    first: dict[str, str] = {}
    for item in items:
        if case := _case(item):
            first.setdefault(case.adapter, case.id)
    items.sort(key=lambda item: bool((case := _case(item)) and first[case.adapter] != case.id))
    config.stash[_LEFT] = dict.fromkeys(item.nodeid for item in items)


def _case(item: pytest.Item) -> Case | None:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    found = parameters.get("case") or parameters.get("conforming")
    return found if isinstance(found, Case) else None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Start no other test once the time is up."""
    left = item.config.stash.get(_LEFT, None)
    if left is None:
        return
    left.pop(item.nodeid, None)
    limit, taken = selection(item.config).max_seconds, time.monotonic() - item.config.stash[_BEGUN]
    if limit is not None and taken > limit and nextitem is not None:
        item.config.stash[_UP] = True
        item.session.shouldstop = (
            f"--max-time {item.config.getoption('--max-time')} is up; {pluralize(len(left), 'test')} not run"
        )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    """List the tests that were not run."""
    unrun: dict[str, None] = config.stash.get(_LEFT, {})
    if left := [] if config.option.collectonly else list(unrun):
        up = config.stash.get(_UP, False)  # else -x or a signal has ended it
        terminalreporter.section(
            "not run: the time was up" if up else "not run: the run was ended before its time was up"
        )
        for test in left[:_NAMED]:
            terminalreporter.write_line(test)
        if len(left) > _NAMED:
            terminalreporter.write_line(f"... and {len(left) - _NAMED} more")
        terminalreporter.write_line("The same command with --resume goes on from here.")
