"""Gives the suites their cases."""

import pytest

from meshmark.plugin import Selection
from meshmark.spec.case import Case
from meshmark.suites.cases import matrix


def pytest_meshmark_cases(config: pytest.Config, selection: Selection) -> list[Case]:
    return matrix(selection.adapters, selection.worlds, selection.workloads, selection.precisions)
