"""Gives the suites their cases, and the plugin's fixtures once more: next to the tests they come before fixtures of
the same names (`runner` is a common one) in the conftest.py of a repository that the suites are run in."""

from pathlib import Path

import pytest

from meshmark.adapter.matrix import matrix
from meshmark.pytest_plugin.plugin import alone, baseline, observed, profiled, runner, scenarios, timed  # noqa: F401
from meshmark.pytest_plugin.selection import OPTIONAL, Selection
from meshmark.spec.case import Case, InvalidLayout


def pytest_meshmark_cases(config: pytest.Config, selection: Selection) -> list[Case | InvalidLayout]:
    chosen = selection
    return matrix(chosen.adapters, chosen.worlds, chosen.workloads, chosen.precisions, chosen.layouts, chosen.tunings)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out suites that run only if the user asks for them.

    Conformance, which runs many clauses per adapter, and profiles run by their option or their file. Convergence, which
    tests no adapter, and inference, which has adapters of its own, run by their file only.
    """
    asked = {f"test_{name}.py": config.getoption(f"--{name}") for name in OPTIONAL}
    asked["test_convergence.py"] = asked["test_inference.py"] = False
    if asked.get(collection_path.name, True):
        return None
    named = [argument.partition("::")[0] for argument in config.args]
    files = {(config.invocation_params.dir / name).resolve() for name in named}
    module = f"meshmark.suites.{collection_path.stem}"
    return None if module in named or collection_path.resolve() in files else True
