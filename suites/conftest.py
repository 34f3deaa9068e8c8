"""Gives the suites their cases, and the plugin's fixtures once more: next to the tests they come before fixtures of
the same names (`runner` is a common one) in the conftest.py of a repository that the suites are run in."""

import pytest

from meshmark.plugin import Selection, observed, runner, timed  # noqa: F401
from meshmark.spec.case import Case
from meshmark.suites.cases import matrix


def pytest_meshmark_cases(config: pytest.Config, selection: Selection) -> list[Case]:
    return matrix(selection.adapters, selection.worlds, selection.workloads, selection.precisions)
