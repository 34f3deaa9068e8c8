"""Gives the suites their cases."""

from pathlib import Path

import pytest

from meshmark.adapter.matrix import matrix
from meshmark.plugin import Selection
from meshmark.spec.case import Case, Misfit


def pytest_meshmark_cases(config: pytest.Config, selection: Selection) -> list[Case | Misfit]:
    return matrix(selection.adapters, selection.worlds, selection.workloads, selection.precisions)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Conformance, at 26 clauses an adapter, is asked for: by its option or its file."""
    if collection_path.name != "test_conformance.py" or config.getoption("--conformance"):
        return None
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    return None if collection_path in named else True
