"""Runs each scenario once per session, and judges clauses by the records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshmark.adapter.contract import Feature
from meshmark.conformance.clauses import Clause, judge_clause, point_back
from meshmark.conformance.finding import Finding
from meshmark.conformance.scenario import SCENARIOS, Scenario
from meshmark.judge.deviation import Assess
from meshmark.records.record import Record
from meshmark.run.runner import Runner
from meshmark.spec.case import Case


class ScenarioRunner:
    """Runs the scenarios of the conformance suite on a `Runner`."""

    def __init__(self, runner: Runner, scenarios: Mapping[str, Scenario] = SCENARIOS) -> None:
        """`scenarios`: those of the suite by name, or others in their place that end alike."""
        self.runner, self.scenarios = runner, scenarios
        self._records: dict[tuple[str, Case], Record] = {}
        """Records by scenario and base. Cached, because nodes or files that they depended on may be gone later."""
        self._judged: dict[Case, dict[str, Finding]] = {}
        """Findings of clauses for each base, in the order in which they were judged."""

    def perform(self, scenario: Scenario, base: Case) -> Record:
        """Return the record of `scenario` for `base`, or that of the scenario before it if that one failed."""
        key = scenario.name, base
        if key not in self._records:
            self._records[key] = self._perform(scenario, base)
        return self._records[key]

    def _perform(self, scenario: Scenario, base: Case) -> Record:
        if scenario.after:
            before = self.perform(self.scenarios[scenario.after], base)
            if before.outcome.status is not self.scenarios[scenario.after].ends:
                return before
        case, misfit = scenario.varied(base)
        saves = Feature.SAVE in scenario.needs
        if saves and (apart := self.runner.scratch.missing):
            nodes = ", ".join(map(str, apart))
            misfit = (
                misfit or f"node {nodes} does not see node 0's results: --results DIR on a file system of all nodes"
            )
        lacks = self.runner.adapter(case).capabilities.lacks
        request = dataclasses.replace(
            self.runner.request(scenario.task, case, Assess.FULL),  # --assess is of the matrix of cases
            steps=scenario.steps,
            scenario=scenario.name,
            base=base,
            metered=scenario.metered,
            evaluate=scenario.evaluate and Feature.EVALUATE not in lacks,
            checkpoint=str(self.runner.scratch.checkpoint(base, scenario.after or scenario.name)) if saves else "",
        )
        return self.runner.once(request, scenario.needs, misfit)

    def perform_all(self, clause: Clause, base: Case) -> dict[str, Record]:
        """Return the records of all scenarios that `clause` needs."""
        return {name: self.perform(self.scenarios[name], base) for name in clause.scenarios}

    def judge(self, clause: Clause, base: Case) -> Finding:
        """Return the finding of `clause` for `base`, or a reference to an earlier clause with the same defect."""
        judged = self._judged.setdefault(base, {})
        judged[clause.name] = judge_clause(clause, self.perform_all(clause, base))
        return point_back(clause.name, judged[clause.name], judged)
