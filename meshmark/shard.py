"""`--shard 2/4`: the second of four parts of a run, for tasks of a job array and for CI. Loaded by the plugin."""

from __future__ import annotations

import pytest

from meshmark.selection import selection
from meshmark.spec.case import Cell


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All tests of one case are in one part, for they share its launches; cases take turns, for neighbours take about
    as long. What has no case is in the first."""
    if config.getoption("--shard") is None:
        return
    number, parts = selection(config).shard
    places: dict[str, int] = {}
    mine, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        cell = _cell(item)
        place = places.setdefault(cell, len(places)) if cell else 0
        (mine if place % parts == number - 1 else others).append(item)
    items[:] = mine
    config.hook.pytest_deselected(items=others)


def _cell(item: pytest.Item) -> str | None:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    for name in ("case", "conforming"):
        if isinstance(cell := parameters.get(name), Cell):
            return f"{name} {cell.id}"
    return None
