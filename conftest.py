"""Puts the checkout first on the path and loads Meshmark's plugin, installed or not."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE))

import meshmark  # noqa: E402


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Here and not as `pytest_plugins`, which pytest refuses of a conftest that it meets late: as with
    `--pyargs meshmark.suites` in another folder, where the entry point has loaded the plugin by then."""
    found = Path(meshmark.__file__).parent.parent.resolve()
    if found != HERE:
        raise pytest.UsageError(f"meshmark comes from {found}, not from this checkout: start it as `python -m pytest`")
    pluginmanager.import_plugin("meshmark.plugin")
