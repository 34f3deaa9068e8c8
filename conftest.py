"""Puts the checkout first on the path and loads Meshmark's plugin, installed or not."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE))

pytest_plugins = ["meshmark.pytest_plugin.plugin"]  # does nothing where the entry point has done it


def pytest_configure() -> None:
    """An entry point is imported before any conftest, so an installed Meshmark comes before the checkout's."""
    found = Path(sys.modules["meshmark"].__file__ or "").parent.parent.resolve()
    if found != HERE:
        raise pytest.UsageError(f"meshmark comes from {found}, not from this checkout: start it as `python -m pytest`")
