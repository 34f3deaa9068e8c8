"""By which algorithm replicas train: its exact transition, traces by replica, and PyTorch's post-local SGD for real."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshmark.adapter.contract import Capabilities, Feature
from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ADAPTERS
from meshmark.algorithms.contract import Synchronous, Tensors, Transition
from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.conformance.clauses import CLAUSES, judge_clause
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario import SCENARIOS, plain_cells
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.errors import InputError
from meshmark.judge.deviation import Drift, Quantity, QuantityKind, by_replica, replicas_of_ranks
from meshmark.judge.faults import Fault
from meshmark.judge.replica_diagnosis import diagnose_replicas
from meshmark.judge.tolerance_model import fit, noise_run
from meshmark.judge.trace import Trace, gather_replicas
from meshmark.judge.truth import ExactOptimizer, assess_replicas, exact_gradients, initial_values
from meshmark.launch.launch import ForkserverLauncher
from meshmark.passes.noise import noise_key
from meshmark.records.record import Record, Status
from meshmark.reference.data import make_batch
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from meshmark.spec.algorithm import SYNCHRONOUS, Algorithm, algorithm_classes
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from meshmark.theory.traffic import bytes_by_kind
from tests.broken.mutants import BY_NAME, target
from tests.factories import make_workload
from tests.test_gather import on_ranks

LOCAL = workload("gpt-mini-local-sgd2")
TWO = Layout(dp=2, num_micro_batches=2)
PLAIN_SGD = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
LOSS = QuantityKind.LOSS.of()


# What is asked


def test_an_algorithm_says_when_replicas_meet() -> None:
    spec = LocalSGD(period=2, warmup_steps=1)
    assert [spec.reduces_gradients(step) for step in range(5)] == [True, False, False, False, False]
    assert [spec.averages_after(step) for step in range(5)] == [False, True, False, True, False]
    assert not any(SYNCHRONOUS.averages_after(step) for step in range(5))
    assert all(SYNCHRONOUS.reduces_gradients(step) for step in range(5))


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"period": 0}, "period is 0, expected at least 1"),
        ({"warmup_steps": -1}, "warmup_steps is -1, expected 0 or more"),
    ],
)
def test_an_algorithm_that_means_nothing_is_an_error(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        LocalSGD(**wrong)


def test_ids_tell_the_algorithm_where_it_is_not_the_synchronous_one() -> None:
    def id_of(problem: Workload) -> str:
        return Case(adapter="a", workload=problem, layout=TWO).id

    mini = workload("gpt-mini")
    assert id_of(mini) == "a-dp2.mb2-gpt-mini-fp32"
    assert id_of(LOCAL) == "a-dp2.mb2-gpt-mini-local-sgd2-fp32"
    assert id_of(dataclasses.replace(mini, algorithm=LOCAL.algorithm)) == id_of(LOCAL)
    seldom = LocalSGD(period=3, warmup_steps=1)
    assert id_of(dataclasses.replace(mini, algorithm=seldom)) == "a-dp2.mb2-gpt-mini-local-sgd3w1-fp32"
    assert decode(Workload, encode(LOCAL)) == LOCAL


def test_records_of_before_are_of_synchronous_training() -> None:
    old = encode(workload("gpt-mini"))
    del old["algorithm"]
    assert decode(Workload, old) == workload("gpt-mini")


def test_an_adapter_refuses_the_algorithms_that_it_has_not() -> None:
    for name, target_ in ADAPTERS.items():
        for problem in (LOCAL, workload("gpt-mini")):
            case = Case(adapter=name, workload=problem, layout=TWO)
            reason = load_adapter(target_).capabilities.refusal(case, "cpu", "gloo") or ""
            has = (name == "post-local-sgd") == (problem is LOCAL)
            assert (f"algorithm {problem.algorithm.kind} (it trains by" in reason) != has, (name, reason)


def test_replicas_that_differ_have_no_batch_norms() -> None:
    with pytest.raises(InputError, match="'vit-digits-bn': model 'vit-mini-bn' has batch norms.* is local-sgd; take a"):
        dataclasses.replace(workload("vit-digits-bn"), algorithm=LocalSGD(period=2))
    assert dataclasses.replace(workload("vit-digits"), algorithm=LocalSGD(period=2)).id == "vit-digits-local-sgd2"


def test_reductions_that_round_are_refused_where_replicas_differ() -> None:
    anything = Capabilities(
        degrees=frozenset({"dp"}),
        precisions=frozenset(Precision.PRESETS.values()),
        algorithms=frozenset(algorithm_classes()),
    )

    def refusal(problem: Workload, precision: Precision) -> str | None:
        case = Case(adapter="a", workload=problem, layout=TWO, precision=precision)
        return anything.refusal(case, "cpu", "gloo")

    refused = refusal(LOCAL, Precision.BF16_REDUCE_BF16)
    assert refused == "a does not support algorithm local-sgd with reductions in bfloat16 (its noise is not known)"
    assert refusal(LOCAL, Precision.BF16) is None
    assert refusal(workload("gpt-mini"), Precision.BF16_REDUCE_BF16) is None


def test_noise_is_measured_for_the_number_of_replicas() -> None:
    def key(problem: Workload, dp: int) -> str:
        return noise_key(Case(adapter="a", workload=problem, layout=Layout(dp=dp, num_micro_batches=4 // dp)), 3)

    assert key(LOCAL, 2) != key(LOCAL, 4)
    assert key(workload("gpt-mini"), 2) == key(workload("gpt-mini"), 4)


# The exact transition


def algorithm(options: LocalSGD, optimizer: OptimizerSpec, count: int) -> Transition:
    problem = make_workload(algorithm=options, optimizer=optimizer)
    return options.transition(problem, [ExactOptimizer(optimizer) for _ in range(count)])


def test_local_sgd_steps_alone_and_then_meets() -> None:
    exact = algorithm(LocalSGD(period=2, warmup_steps=1), PLAIN_SGD, 2)
    states: list[Tensors] = [{"a.weight": np.array([1.0, 2.0])}, {"a.weight": np.array([3.0, 4.0])}]
    gradients: list[Tensors] = [{"a.weight": np.array([1.0, 0.0])}, {"a.weight": np.array([0.0, 5.0])}]
    alone, mean = [[0.9, 2.0], [3.0, 3.5]], [[1.95, 2.75]] * 2
    for expected in (alone, mean, alone, mean):
        found = [after["a.weight"] for after in exact.transition(states, gradients)]
        np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_in_the_warm_up_each_replica_steps_on_the_mean_and_afterwards_its_own() -> None:
    exact = algorithm(LocalSGD(period=2, warmup_steps=1), PLAIN_SGD, 2)
    shares: list[Tensors] = [{"a": np.array([1.0])}, {"a": np.array([2.0])}]
    assert [float(own["a"][0]) for own in exact.reported(shares)] == [3.0, 3.0]
    exact.transition(shares, shares)
    assert [float(own["a"][0]) for own in exact.reported(shares)] == [2.0, 4.0]


def test_averaging_after_every_plain_step_is_synchronous_training() -> None:
    """Which is what makes the replicas' losses, n times their shares, the right ones."""
    problem = make_workload(optimizer=PLAIN_SGD)
    start = {name: x.astype(np.float64) for name, x in initial_values(problem).items()}
    together, local = Synchronous(ExactOptimizer(PLAIN_SGD)), algorithm(LocalSGD(period=1), PLAIN_SGD, 2)
    states, whole = [start, start], [start]
    for step in range(3):
        batch = make_batch(problem, step)
        shares = [exact_gradients(problem, here, local.part(batch, r)).gradients for r, here in enumerate(states)]
        states = local.transition(states, local.reported(shares))
        whole = together.transition(whole, [exact_gradients(problem, whole[0], batch).gradients])
        for name, x in whole[0].items():
            np.testing.assert_allclose(states[0][name], x, rtol=0, atol=1e-14)
            assert np.array_equal(states[0][name], states[1][name])


def exact_run(problem: Workload, num_steps: int, replicas: int) -> list[Trace]:
    """A run that is right to the last bit of float64."""
    spec = problem.algorithm
    exact = algorithm(spec, problem.optimizer, replicas)
    traces = [Trace(parameters=[dict(initial_values(problem))]) for _ in range(replicas)]
    for step in range(num_steps):
        here = [{n: x.astype(np.float64) for n, x in trace.parameters[step].items()} for trace in traces]
        truth = [exact_gradients(problem, h, exact.part(make_batch(problem, step), r)) for r, h in enumerate(here)]
        reported = exact.reported([e.gradients for e in truth])
        for trace, e, own, after in zip(traces, truth, reported, exact.transition(here, reported), strict=True):
            trace.losses.append(e.loss)
            trace.gradients.append(own)
            trace.norms.append(None)
            trace.parameters.append(after)
    return traces


def test_every_replica_is_compared_with_its_own_truth() -> None:
    problem = make_workload(algorithm=LocalSGD(period=2, warmup_steps=1))
    traces = exact_run(problem, 4, 2)
    found = assess_replicas(traces, problem)
    assert max(d.distance for steps in found.values() for d in steps) < 1e-13
    first, second = by_replica(found, 2)
    assert first.keys() == second.keys() and len(first) + len(second) == len(found)
    assert {str(q.kind) for q in first} == {"initial", "loss", "gradients", "parameters"}
    assert first[LOSS][1].scale != second[LOSS][1].scale
    name = "head.output.weight"
    traces[1].parameters[2][name] = traces[1].parameters[2][name] + 1e-3  # where step 1 leaves it, and 2 begins
    found = assess_replicas(traces, problem)
    wrong = {q for q, steps in found.items() if len(steps) > 1 and steps[1].distance > 1e-4}
    assert wrong == {Quantity(kind=QuantityKind.PARAMETERS, name=name, replica=1)}


def test_a_parameter_that_one_replica_does_not_tell_is_named() -> None:
    problem = make_workload(algorithm=LocalSGD(period=2))
    traces = exact_run(problem, 3, 2)
    honest = fit([noise_run(assess_replicas(traces, problem), Precision.FP32)] * 2)
    case = Case(adapter="a", workload=problem, layout=Layout(dp=2))
    assert diagnose_replicas(case, traces, assess_replicas(traces, problem), [], honest) is None
    del traces[1].parameters[3]["head.output.weight"]
    found = diagnose_replicas(case, traces, assess_replicas(traces, problem), [], honest)
    assert found is not None and (found.fault, found.step) == (Fault.MISSING, 2)
    assert found.names == ["head.output.weight"]


# Traces by replica


def test_ranks_of_one_replica_must_agree_and_those_of_two_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def gathered(rank: int) -> tuple[list[float], list[list[float]], list[Drift], int]:
        own = Trace(
            parameters=[{"a": np.array([1.0 + 9 * (rank == 2)]), "b": np.array([float(rank)])}],
            losses=[2.0**rank],
        )
        traces, drifts, num_replicated = gather_replicas(own, [0, 0, 1])
        values = [[float(x[0]) for x in trace.parameters[0].values()] for trace in traces]
        return [trace.losses[0] for trace in traces], values, drifts, num_replicated

    first, *others = on_ranks(tmp_path, gathered)
    losses, values, drifts, num_replicated = first
    assert losses == [3.0, 4.0]
    assert values == [[1.0, 0.0], [10.0, 2.0]]
    assert drifts == [Drift(quantity=QuantityKind.PARAMETERS.of("b"), step=0, ranks=[1], others=[0])]
    assert num_replicated == 2
    assert all(other[:2] == ([], []) for other in others)


def test_ranks_stand_in_the_replica_of_their_data_parallel_index() -> None:
    case = Case(adapter="a", workload=LOCAL, layout=Layout(dp=2, tp=2, pp=2))
    assert replicas_of_ranks(case) == [0, 0, 1, 1, 0, 0, 1, 1]
    synchronous = dataclasses.replace(case, workload=workload("gpt-mini"))
    assert replicas_of_ranks(synchronous) == [0] * 8


def test_a_replica_s_noise_is_its_own() -> None:
    texts = {"loss/replica0": [0.0], "loss/replica1": [1.0], "gradients/replica1:a.b": [5.0]}
    noise, gradient = {Quantity.parse(text): values for text, values in texts.items()}, QuantityKind.GRADIENTS.of("a.b")
    assert by_replica(noise, 2) == [{LOSS: [0.0]}, {LOSS: [1.0], gradient: [5.0]}]
    assert by_replica({gradient: [5.0]}, 1) == [{gradient: [5.0]}]


# For real

MUTANTS = ["AveragesLate", "AveragesGradients"]
"""`make power` runs all."""


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {name: target(name) for name in BY_NAME} | ADAPTERS
    options = RunOptions(observed_steps=4, time_limit_seconds=400)
    running = Runner(launcher, known, options, tmp_path_factory.mktemp("results"))
    yield running
    running.close()


def observe(runner: Runner, spec: Algorithm, dp: int = 2) -> Record:
    problem = dataclasses.replace(workload("gpt-mini"), algorithm=spec)
    layout = Layout(dp=dp, num_micro_batches=2)
    return runner.observe(Case(adapter="post-local-sgd", workload=problem, layout=layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, dp, sent",
    [
        pytest.param(LocalSGD(period=3), 2, "nothing", id="the metered step is taken alone"),
        pytest.param(LocalSGD(period=2, warmup_steps=3), 2, "reduces", id="the metered step is of the warm-up"),
        pytest.param(LOCAL.algorithm, 4, "averages", id="four replicas"),
    ],
)
def test_pytorchs_post_local_sgd_trains_right_and_sends_what_it_should(
    runner: Runner, spec: Algorithm, dp: int, sent: str
) -> None:
    record = observe(runner, spec, dp)
    assert record.outcome.status is Status.OK, record.outcome.message
    summaries = [v.summary for v in record.verdicts]
    assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"], summaries
    assert record.equivalence.diagnosis is None and not record.equivalence.drifts
    whole = 4 * record.case.workload.model.num_parameters
    planned = {} if sent == "nothing" else {"all_reduce": whole}
    assert [bytes_by_kind(flows) for flows in record.traffic.planned] == [planned] * dp
    replicas = by_replica(record.equivalence.deviations, dp)
    assert all(replica.keys() == replicas[0].keys() and QuantityKind.NORM.of() in replica for replica in replicas)
    apart = {replica[QuantityKind.GRADIENTS.of("head.output.weight")][2].scale for replica in replicas}
    assert len(apart) == (1 if sent == "reduces" else dp), "each replica's gradient is its own"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_another_algorithm_is_caught_and_named(runner: Runner, name: str) -> None:
    mutant = BY_NAME[f"post_local_sgd_{name}_by_local_sgd2"]
    record = runner.observe(mutant.case)
    verdict = record.verdict("equivalence")
    assert verdict is not None and not verdict.passed, record.outcome.message
    diagnosis = record.equivalence.diagnosis
    assert diagnosis is not None and diagnosis.fault in mutant.faults, diagnosis
    if name == "AveragesLate":
        assert diagnosis.step == 0
        assert "due after this step is not taken, but 1 late, after step 1" in diagnosis.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipping", "resume"])
def test_clauses_of_conformance_hold_of_every_replica(runner: Runner, name: str) -> None:
    adapter = load_adapter(ADAPTERS["post-local-sgd"])
    (base,) = plain_cells("post-local-sgd", adapter, 2)
    assert isinstance(base, Case) and base.workload.algorithm == LocalSGD(period=2)
    records = {
        scenario: ScenarioRunner(runner).perform(SCENARIOS[scenario], base) for scenario in CLAUSES[name].scenarios
    }
    found = judge_clause(CLAUSES[name], records)
    assert found.result is ClauseResult.PASS, found.evidence


def test_what_cannot_be_asked_of_it_is_skipped_with_a_reason() -> None:
    capabilities = load_adapter(ADAPTERS["post-local-sgd"]).capabilities
    half = Case(adapter="post-local-sgd", workload=LOCAL, layout=TWO, precision=Precision.FP16)
    assert "does not join the averaging" in (capabilities.refusal(half, "cpu", "gloo") or "")
    whole = dataclasses.replace(half, precision=Precision.FP32)
    assert capabilities.refusal(whole, "cpu", "gloo") is None
    assert "other ones" in str(capabilities.lacking(frozenset({Feature.RESHARD})))
