"""Gives the suites their cases."""

from pathlib import Path

import pytest

from meshmark.plugin import Selection
from meshmark.spec.case import Case, Misfit
from meshmark.suites.cases import matrix


def pytest_meshmark_cases(config: pytest.Config, selection: Selection) -> list[Case | Misfit]:
    return matrix(selection.adapters, selection.worlds, selection.workloads, selection.precisions)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Conformance, at 26 clauses an adapter, is asked for. Pytest does not ask this about a file that is named."""
    return True if collection_path.name == "test_conformance.py" and not config.getoption("--conformance") else None
