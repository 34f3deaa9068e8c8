"""Engines that train on without an error, and wrongly, through the launcher: a handful of what `make power` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from benchmarks.honest import NUM_SAMPLES, measure_batched
from benchmarks.power_page import SUITES
from benchmarks.problems import SMALL, varied
from benchmarks.trials import MutantRunner
from meshmark.conformance.clauses import CLAUSES
from meshmark.judge.deviation import OBSERVED_STEPS, Assess
from meshmark.judge.faults import Fault
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.module import parameter_shapes
from meshmark.passes.noise import NUM_RUNS
from meshmark.records.record import Record
from meshmark.run.runner import Runner, RunOptions
from meshmark.run.verdict import detection_limits
from meshmark.spec.case import Case
from tests.broken.engine import ONE_NORM
from tests.broken.mutant import GPT, LAYOUTS
from tests.broken.mutants import BROKEN_ADAPTERS, BY_NAME, MUTANTS, sized, target

SOME = [
    "ddp_NoReduction",
    "gpipe_ScalesGrads",
    "fsdp2_Bf16Accumulation",
    "gpipe_NeverUpdates",
    "fsdp2_ShardingIgnored",
    "ddp_ReducesOneAgain",
    "hf_trainer_DividesByOwnTokens",
]
SLIGHT = sized("ddp", "NormGradient", 3e-6)
OF_SOME_STEPS = [
    "ddp_ReducesAgainAtStep3",
    "ddp_ReducesAgainAtFirst",
    "ddp_TakesBufferAtStep3",
    "ddp_LeaksOnOneRank",
]
ON_THE_CLOCK = [
    "ddp_StepsUnreduced",
    "ddp_StepsUnclipped",
    "ddp_StepsUnclippedInTheEnd",
    "ddp_StepsOnHalfTheBatch",
    "ddp_ReducesFirstSteps",
]
OF_CLAUSES = [
    "ddp_SameMasksOnRanks_dropout",
    "ddp_NotRescaled_dropout",
    "gpipe_StaysInEvaluation_dropout",
    "ddp_StaysInFp32_bf16_states",
    "ddp_OverflowMovesMoments_fp16_overflow",
    "ddp_ForgetsSecondMoments_resume",
    "ddp_SavesMomentsLater_recovery",
    "gpipe_PerMicroBatch_schedule",
    "ddp_HidesMessage_error",
]
"""By clauses of conformance."""


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {name: target(name) for name in [*SOME, *ON_THE_CLOCK, SLIGHT]} | {"ddp": "meshmark.adapters.ddp:DDP"}
    running = Runner(launcher, known, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def longer(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runs as many steps as the suites, and compares nothing with float64."""
    known = {name: target(name) for name in OF_SOME_STEPS} | {"ddp": "meshmark.adapters.ddp:DDP"}
    running = Runner(launcher, known, RunOptions(assess=Assess.OFF), tmp_path_factory.mktemp("longer"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def mutant_runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MutantRunner]:
    running = MutantRunner(
        launcher, {name: target(name) for name in OF_CLAUSES}, tmp_path_factory.mktemp("mutant_runner")
    )
    yield running
    running.close()


def observe(runner: Runner, adapter: str) -> Record:
    return runner.observe(Case(adapter=adapter, workload=GPT, layout=LAYOUTS["ddp"]))


def test_the_adapter_that_they_break_passes(runner: Runner) -> None:
    record = observe(runner, "ddp")
    assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"]
    assert record.equivalence.diagnosis is None
    limits = detection_limits(record)
    blind = {name for name in parameter_shapes(GPT.model) if name.endswith("attention.k.bias")}
    assert len(blind) == GPT.transformer.num_layers, "their gradients are zero by mathematics"
    assert limits.keys() == parameter_shapes(GPT.model).keys() - blind
    assert max(limit.scaling for limit in limits.values()) < 5e-6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "fsdp2_Bf16Accumulation" else name for name in SOME]
)
def test_a_mutant_is_caught_by_the_suite_that_should_with_the_right_diagnosis(runner: Runner, name: str) -> None:
    mutant = BY_NAME[name]
    record = runner.observe(mutant.case)
    verdict = record.verdict(mutant.suite)
    assert verdict is not None and not verdict.passed, record.outcome.message
    if mutant.faults:
        assert record.equivalence.diagnosis is not None and record.equivalence.diagnosis.fault in mutant.faults
        assert verdict.evidence["diagnosis"] == record.equivalence.diagnosis.text


@pytest.mark.parametrize("name", OF_SOME_STEPS)
def test_what_one_step_does_otherwise_is_caught(longer: Runner, name: str) -> None:
    """None of these is seen in the metered step."""
    mutant = BY_NAME[name]
    verdict = longer.observe(mutant.case).verdict(mutant.suite)
    assert verdict is not None and not verdict.passed


def test_an_engine_right_in_all_steps_passes(longer: Runner) -> None:
    record = longer.observe(Case(adapter="ddp", workload=GPT, layout=LAYOUTS["ddp"]))
    assert [v.suite for v in record.verdicts if v.passed] == ["memory", "communication"]
    (first, second), (live, _) = record.traffic.alike_steps[0], record.memory.live_bytes
    assert (first.steps, second.steps) == ([0, 2, 3, 4], [1]), "buckets are made again in step 1"
    assert set(live) == set(range(OBSERVED_STEPS)) and len(set(live.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CLAUSES)
def test_a_mutant_is_caught_by_the_clause_that_should(mutant_runner: MutantRunner, name: str) -> None:
    trial = mutant_runner.attempt(BY_NAME[name])
    assert trial.caught, trial.explanation
    assert trial.named, trial.explanation


@pytest.mark.slow
def test_steps_that_are_not_those_that_were_judged_are_caught_on_the_clock(runner: Runner) -> None:
    """A defect in the last step shows only in its replicas, which drift when nobody looks any more."""
    told = {}
    for name in ON_THE_CLOCK:
        verdict = runner.time(BY_NAME[name].case).verdict("throughput")
        assert verdict is not None and not verdict.passed
        told[name.removeprefix("ddp_")] = verdict.summary
    assert told.pop("ReducesFirstSteps").startswith("replicas differ after timed steps: parameters/")
    assert told.pop("StepsUnreduced").startswith("replicas differ after timed steps: parameters/")
    assert told["StepsOnHalfTheBatch"].startswith("not what was judged: the loss of step 0 is ")
    assert told["StepsUnclipped"].startswith("not what was judged: the loss of step 1 is ")
    assert told["StepsUnclippedInTheEnd"].startswith("not what was judged: the loss of step 11 is ")


def test_steps_of_a_correct_adapter_are_those_that_were_judged(runner: Runner) -> None:
    """Whether its instrumented pass was before, or is run for this."""
    case = Case(adapter="ddp", workload=GPT, layout=LAYOUTS["ddp"])
    alone = runner.time(dataclasses.replace(case, workload=dataclasses.replace(GPT, seed=1))).verdict("throughput")
    runner.observe(case)
    for verdict in (alone, runner.time(case).verdict("throughput")):
        assert verdict is not None and verdict.passed
        steps = verdict.evidence["steps"]
        assert verdict.summary == f"bit for bit what was judged: {steps} losses, parameters after 2 and {steps} steps"


def test_where_no_rank_reduces_none_is_blamed(runner: Runner) -> None:
    diagnosis = runner.observe(BY_NAME["ddp_NoReduction"].case).equivalence.diagnosis
    assert diagnosis is not None and not diagnosis.ranks
    assert "no rank reduced, each holds the part of one data-parallel rank alone" in diagnosis.detail
    assert "rank 0 that of 0, rank 1 that of 1" in diagnosis.detail


def test_one_gradient_off_by_three_millionths(runner: Runner) -> None:
    record = observe(runner, SLIGHT)
    assert record.equivalence.diagnosis is not None
    assert (record.equivalence.diagnosis.fault, record.equivalence.diagnosis.names) == (Fault.SCALED, [ONE_NORM])


def test_correct_runs_do_not_alarm() -> None:
    """Those of `single`, one by one, are `make power`'s."""
    group = measure_batched(varied(SMALL[0], 3))
    assert len(group.excesses) == NUM_SAMPLES * NUM_RUNS, "no two of the same bits"
    assert max(group.excesses) < 1


def test_the_table_of_mutants_is_broad() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 40
    assert {m.suite for m in MUTANTS if m.suite} == set(SUITES), "the page has a row for each"
    assert {m.clause for m in MUTANTS if m.clause} == set(CLAUSES) - {"determinism"}, "which is told, not required"
    assert {m.adapter for m in MUTANTS} == set(BROKEN_ADAPTERS)
    assert set().union(*(m.faults for m in MUTANTS)) == set(Fault) - {Fault.UNEXPLAINED}
