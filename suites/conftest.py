"""Gives the suites their cases."""

import pytest

from meshmark.adapter.matrix import matrix
from meshmark.plugin import Selection
from meshmark.spec.case import Case


def pytest_meshmark_cases(config: pytest.Config, selection: Selection) -> list[Case]:
    return matrix(selection.adapters, selection.worlds, selection.workloads, selection.precisions)
