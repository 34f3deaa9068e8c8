"""`--shard 2/4`: the second of four parts of a run, for tasks of a job array and for CI. Loaded by the plugin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshmark.pytest_plugin.selection import selection
from meshmark.spec.case import Cell


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of this part.

    All tests of a case are in one part, because they share launches. Cases are dealt in turn, because neighbours take
    similar time. Tests without a case are in the first part.
    """
    if config.getoption("--shard") is None:
        return
    number, parts = selection(config).shard
    chosen = in_part([_cell(item) for item in items], number, parts)
    config.hook.pytest_deselected(items=[item for item, mine in zip(items, chosen, strict=True) if not mine])
    items[:] = [item for item, mine in zip(items, chosen, strict=True) if mine]


def in_part(cells: Sequence[str | None], number: int, parts: int) -> list[bool]:
    """Return whether each test, given its case, is in part `number` of `parts`."""
    places: dict[str, int] = {}
    turns = [places.setdefault(cell, len(places)) if cell else 0 for cell in cells]
    return [turn % parts == number - 1 for turn in turns]


def _cell(item: pytest.Item) -> str | None:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    for name in ("case", "conforming"):
        if isinstance(cell := parameters.get(name), Cell):
            return f"{name} {cell.id}"
    return None
