"""torchtitan's own Trainer: judged as engines are, on each of its axes, and seen to be wrong where it is spoilt.

Its ranks start in the environment `torchtitan` (`make env NAME=torchtitan`); without it these tests skip.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario import plain_cells
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.launch.launch import ForkserverLauncher
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.workload import workload
from tests.broken.mutant import Mutant
from tests.broken.mutants import target
from tests.broken.roster import ROSTER_MUTANTS

LAYOUTS = {
    "torchtitan": Layout(dp=2, zero_stage=3, num_micro_batches=2),
    "torchtitan-tp": Layout(tp=2, num_micro_batches=2),
    "torchtitan-pp": Layout(pp=2, num_micro_batches=2, schedule=Schedule.ONE_F_ONE_B),
}
MUTANTS = [mutant for mutant in ROSTER_MUTANTS if mutant.adapter in LAYOUTS]


def _case(name: str) -> Case:
    case = Case(adapter=name, workload=workload("llama-mini"), layout=LAYOUTS[name])
    if reason := load_adapter(builtin_adapters()[name]).refusal(case, "cpu", "gloo"):
        pytest.skip(reason)
    return case


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_judged_as_an_engine_is(name: str, launcher: ForkserverLauncher, tmp_path: Path) -> None:
    case = _case(name)
    runner = Runner(launcher, builtin_adapters(), RunOptions(observed_steps=3), tmp_path)
    record = runner.observe(case)
    runner.close()
    expected = {"equivalence": True, "memory": True} | ({} if case.layout.tp > 1 else {"communication": True})
    judged = {verdict.suite: verdict.passed for verdict in record.verdicts}
    assert judged == expected, record.outcome.message
    assert record.environment.versions["virtual environment"] == "torchtitan"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_resumes_exactly_by_its_own_checkpoints(name: str, launcher: ForkserverLauncher, tmp_path: Path) -> None:
    _case(name)
    runner = Runner(launcher, builtin_adapters(), RunOptions(), tmp_path)
    [base] = plain_cells(name, load_adapter(builtin_adapters()[name]), 2)
    assert isinstance(base, Case)
    found = ScenarioRunner(runner).judge(CLAUSES["resume"], base)
    runner.close()
    assert found.result is ClauseResult.PASS, found.evidence


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_spoilt_one_fails_and_is_named(mutant: Mutant, launcher: ForkserverLauncher, tmp_path: Path) -> None:
    _case(mutant.adapter)
    runner = Runner(launcher, {mutant.name: target(mutant.name)}, RunOptions(), tmp_path)
    record = runner.observe(mutant.case)
    runner.close()
    verdict, diagnosis = record.verdict("equivalence"), record.equivalence.diagnosis
    assert verdict is not None and not verdict.passed, record.outcome.message
    assert diagnosis is not None and diagnosis.fault in mutant.faults, diagnosis


def test_it_is_refused_on_models_and_layouts_that_are_not_its_own() -> None:
    adapter = load_adapter(builtin_adapters()["torchtitan"])
    gpt = Case(adapter="torchtitan", workload=workload("gpt-mini"), layout=LAYOUTS["torchtitan"])
    assert "its own Llama 3" in str(adapter.supports(gpt, "cpu", "gloo"))
    replicas = Case(adapter="torchtitan", workload=workload("llama-mini"), layout=Layout(dp=2))
    assert "shards over data-parallel ranks" in str(adapter.supports(replicas, "cpu", "gloo"))


def test_an_adapter_without_gpts_is_held_to_the_clauses_on_a_llama() -> None:
    adapter = load_adapter(builtin_adapters()["torchtitan"])
    assert [cell.workload.name for cell in plain_cells("torchtitan", adapter, 2) if isinstance(cell, Case)] == [
        "llama-mini"
    ]
