"""Does the framework keep every clause? One cell of the conformance table a test."""

import pytest

from meshmark.conformance.clauses import CLAUSES, Clause
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.pytest_plugin.plugin import expect_clause
from meshmark.spec.case import Case


@pytest.mark.parametrize("clause", CLAUSES.values(), ids=lambda clause: clause.name.replace(" ", "_"))
def test_conformance(scenarios: ScenarioRunner, conforming: Case, clause: Clause) -> None:
    """Clauses share their scenarios' launches."""
    expect_clause(scenarios, conforming, clause)
