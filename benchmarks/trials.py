"""One mutant, run and judged: by the suite or the clause that should catch it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from meshmark.conformance.clauses import CLAUSES, judge_clause
from meshmark.conformance.finding import ClauseResult, Finding
from meshmark.conformance.scenario import plain_workload
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.launch.launch import Launcher
from meshmark.records.record import Record, Status
from meshmark.run.resume import KeptRecords
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from tests.broken.mutant import Mutant, base_layout, under

STEPS = 3
PATIENCE_SECONDS = 15.0
"""For mutants that hang."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Outcome of a mutant."""

    mutant: Mutant
    record: Record
    """The last of them, where the clause has several scenarios."""
    finding: Finding | None = None
    """The clause's."""

    @property
    def failed(self) -> list[str]:
        """Suites in a plain run; or the clause."""
        if self.finding:
            return [f"clause {self.mutant.clause}"] if self.finding.result is ClauseResult.FAIL else []
        return [v.suite for v in self.record.verdicts if not v.passed]

    @property
    def caught(self) -> bool:
        """By what should: a crash is not a verdict, but of the clause about crashes."""
        ended = self.record.outcome.status is Status.OK or self.mutant.clause == "error"
        return ended and (bool(self.failed) if self.finding else self.mutant.suite in self.failed)

    @property
    def named(self) -> bool:
        diagnosis = self.record.equivalence.diagnosis
        return not self.mutant.faults or (diagnosis is not None and diagnosis.fault in self.mutant.faults)

    @property
    def explanation(self) -> str:
        """The diagnosis if one was asked for, otherwise the text of what fails."""
        if self.record.equivalence.diagnosis and self.mutant.faults:
            return self.record.equivalence.diagnosis.text
        if self.finding:
            return self.finding.evidence
        verdict = self.record.verdict(self.mutant.suite)
        return verdict.summary if verdict else self.record.outcome.message


class MutantRunner:
    """Tries mutants. Those of a clause are run as a conformance pass runs, others as the suites do, only shorter."""

    def __init__(
        self, launcher: Launcher, adapters: dict[str, str], folder: Path, held: KeptRecords | None = None
    ) -> None:
        """Make a runner. Mutants whose results are in `held` are not run again."""
        self.suites = Runner(launcher, adapters, RunOptions(observed_steps=STEPS), folder, held=held)
        warmed = RunOptions(observed_steps=2 * STEPS)
        self.warmed = Runner(launcher, adapters, warmed, folder / "warmed", held=held)
        self._longer = dict[int, Runner]()
        """By steps, for mutants that take more than others to show."""
        self._of_longer: Callable[[int], Runner] = lambda steps: Runner(
            launcher, adapters, RunOptions(observed_steps=steps), folder / f"steps-{steps}", held=held
        )
        impatient = RunOptions(time_limit_seconds=PATIENCE_SECONDS)
        self.clauses = Runner(launcher, adapters, RunOptions(), folder / "clauses")
        self.errors = Runner(launcher, adapters, impatient, folder / "errors")

    def close(self) -> None:
        for runner in (self.suites, self.warmed, self.clauses, self.errors, *self._longer.values()):
            runner.close()

    def attempt(self, mutant: Mutant) -> Trial:
        if mutant.suite == "throughput":
            return Trial(mutant=mutant, record=self.suites.time(mutant.case))
        if mutant.suite:
            # Of what begins after a warm-up, and shows a step later, STEPS have nothing.
            runner = self.warmed if getattr(mutant.workload.algorithm, "warmup_steps", 0) else self.suites
            if mutant.steps:
                if mutant.steps not in self._longer:
                    self._longer[mutant.steps] = self._of_longer(mutant.steps)
                runner = self._longer[mutant.steps]
            return Trial(mutant=mutant, record=runner.observe(mutant.case))
        finding, records = self.judge(mutant.clause, mutant.case)
        return Trial(mutant=mutant, record=records[-1], finding=finding)

    def judge(self, name: str, case: Case) -> tuple[Finding, list[Record]]:
        """One clause of conformance, with the records of its scenarios."""
        clause = CLAUSES[name]
        runner = self.errors if name == "error" else self.clauses
        records = ScenarioRunner(runner).perform_all(clause, case)
        return judge_clause(clause, records), list(records.values())


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A clause of a correct adapter."""

    adapter: str
    clause: str
    finding: Finding
    records: list[Record]
    """Records of the scenarios that show the finding."""

    @property
    def alarm(self) -> bool:
        return self.finding.result is ClauseResult.FAIL


def correct_cells(mutant_runner: MutantRunner, adapter: str) -> Iterable[Cell]:
    """Every clause of an adapter that mutants break, a key of LAYOUTS, as it is."""
    case = Case(
        adapter=adapter.partition("/")[0], workload=under(adapter, plain_workload()), layout=base_layout(adapter)
    )
    for clause in CLAUSES:
        finding, records = mutant_runner.judge(clause, case)
        yield Cell(adapter=adapter, clause=clause, finding=finding, records=records)
