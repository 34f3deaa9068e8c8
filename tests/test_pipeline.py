"""Pipelines through torch.distributed.pipelining, run: 1F1B and interleaved 1F1B, alone and over replicas, and what
theory says of their activations, messages and bubbles. Engines that are broken are caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from meshmark.adapters.pipeline import GPipe, Pipeline
from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.scenario import plain_cells, plain_workload
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.transformer import Family
from meshmark.plan.simulator import task_order
from meshmark.pytest_plugin.plugin import expect, expect_clause
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from meshmark.theory.activations import chunk_in_flight, num_in_flight
from meshmark.theory.grid import layout_grid
from meshmark.theory.memory import model_states
from meshmark.theory.traffic import bytes_by_kind, pipeline_traffic
from tests.broken.mutant import DEEP, GPT, TIED
from tests.broken.mutants import BY_NAME, target
from tests.factories import make_case, make_model, make_workload

ONE_F_ONE_B = Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
INTERLEAVED = replace(ONE_F_ONE_B, schedule=Schedule.INTERLEAVED, virtual_stages=2)
UNEVEN = replace(DEEP, name="gpt-uneven", model=replace(DEEP.model, num_layers=5))
"""Four virtual stages of two, one, one and one layers."""
LLAMA = make_workload(
    model=make_model(family=Family.LLAMA, num_layers=4, hidden=32, ffn_hidden=64, seq_len=32, num_kv_heads=1)
)
MUTANTS = ["pipeline_StageNotReduced", "pipeline_NormOverAllRanks"]
"""`make power` runs all."""
SCALARS = 4 * 2 * 8
"""Bytes of losses and other numbers beside the tensors that are planned, in at most eight bytes each."""


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {"pipeline": "meshmark.adapters.pipeline:Pipeline", "gpipe": "meshmark.adapters.pipeline:GPipe"}
    known |= {name: target(name) for name in MUTANTS}
    options = RunOptions(observed_steps=3)
    running = Runner(launcher, known, options, tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.mark.parametrize(
    "adapter, layout, work, precision",
    [
        ("gpipe", Layout(num_micro_batches=2), GPT, Precision.FP32),
        pytest.param("pipeline", INTERLEAVED, UNEVEN, Precision.FP32, marks=pytest.mark.slow),
        ("pipeline", INTERLEAVED, LLAMA, Precision.FP64),
        pytest.param(
            "pipeline",
            replace(ONE_F_ONE_B, pp=4),
            replace(DEEP, global_batch=4),
            Precision.BF16,
            marks=pytest.mark.slow,
        ),
        ("pipeline", replace(ONE_F_ONE_B, recompute=Recompute.FULL), TIED, Precision.FP32),
        ("pipeline", replace(ONE_F_ONE_B, dp=2), GPT, Precision.FP32),
    ],
    ids=lambda value: getattr(value, "id", None) or getattr(value, "name", str(value)),
)
def test_a_pipeline_trains_right_holds_what_is_planned_and_sends_it(
    runner: Runner, adapter: str, layout: Layout, work: Workload, precision: Precision
) -> None:
    """In two pipelines of four ranks, only the first rank equals both its stage and its shard of the batch."""
    record = runner.observe(Case(adapter=adapter, layout=layout, workload=work, precision=precision))
    for suite in ("equivalence", "memory", "communication"):
        expect(record, suite)
    for reading, plan, declared in zip(
        record.memory.readings, record.memory.planned, record.memory.extra_memory, strict=True
    ):
        assert reading.held is not None and plan.activations is not None
        expected = plan.activations + sum(r.num_bytes for r in declared if r.category == "activations")
        assert expected <= reading.held.activations <= expected + SCALARS


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, clause",
    [
        (INTERLEAVED, "reshard"),
        (replace(ONE_F_ONE_B, dp=2), "resume"),
    ],
    ids=lambda value: getattr(value, "id", value),
)
def test_clauses_hold_of_virtual_stages_and_replicas(runner: Runner, layout: Layout, clause: str) -> None:
    """Which the conformance suite, on a model of two layers and two ranks, has not. Each where there is most to get
    wrong: parts of a rank that come in two, and what replicas must agree about."""
    plain = plain_workload()
    deep = replace(plain, model=replace(plain.model, num_layers=4))
    expect_clause(ScenarioRunner(runner), Case(adapter="pipeline", layout=layout, workload=deep), CLAUSES[clause])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_pipeline_is_caught_and_told(runner: Runner, name: str) -> None:
    mutant = BY_NAME[name]
    record = runner.observe(mutant.case)
    verdict = record.verdict(mutant.suite)
    assert verdict is not None and not verdict.passed, record.outcome.message
    if mutant.faults:
        assert record.equivalence.diagnosis is not None and record.equivalence.diagnosis.fault in mutant.faults
    else:
        equivalence = record.verdict("equivalence")
        assert equivalence is not None and equivalence.passed, "it trains right, but not as was asked"


# What theory says, without a run.


def in_flight(layout: Layout) -> list[list[int]]:
    """By rank, how many forward passes of each chunk it holds when its first backward pass begins."""
    grid = layout_grid(layout, layout.num_micro_batches)
    return [
        [int(chunk_in_flight(grid, num_in_flight(grid, rank), chunk)[0]) for chunk in range(layout.virtual_stages)]
        for rank in range(layout.pp)
    ]


@pytest.mark.parametrize(
    "pp, m, v", [(2, 4, 1), (4, 8, 1), (4, 2, 1), (2, 4, 2), (2, 2, 2), (4, 8, 2), (4, 4, 3), (3, 6, 2)]
)
def test_chunks_in_flight_are_those_that_the_schedules_order_has_run(pp: int, m: int, v: int) -> None:
    for schedule in [Schedule.INTERLEAVED] if v > 1 else [Schedule.GPIPE, Schedule.ONE_F_ONE_B]:
        layout = Layout(pp=pp, num_micro_batches=m, schedule=schedule, virtual_stages=v)
        for rank, counts in enumerate(in_flight(layout)):
            forwards = takewhile(lambda action: action.kind == "F", task_order(layout, rank))
            chunks = [action.chunk for action in forwards]
            assert counts == [chunks.count(chunk) for chunk in range(v)], (layout.id, rank)


def test_virtual_stages_multiply_the_boundaries() -> None:
    """With four stages on two ranks, the first rank has the first stage and the last rank the last: three boundaries
    each."""
    case = make_case("pipeline", INTERLEAVED, workload=LLAMA)
    stream = LLAMA.tokens_per_step * 32 * 4
    for rank in range(2):
        assert bytes_by_kind(pipeline_traffic(case, rank)) == {"send": 3 * stream, "recv": 3 * stream}


def test_replicas_of_a_stage_are_planned_alike_and_stages_are_not() -> None:
    case = make_case("pipeline", replace(ONE_F_ONE_B, dp=2), workload=replace(LLAMA, global_batch=8))
    states = [model_states(case, rank) for rank in range(4)]
    assert states[0] == states[1] != states[2] == states[3]


@pytest.mark.parametrize(
    "layout, words",
    [
        (replace(ONE_F_ONE_B, num_micro_batches=1), "1F1B over 2 stages takes at least as many micro-batches, got 1"),
        (replace(INTERLEAVED, num_micro_batches=1), "a multiple of them of micro-batches, got pp 2 and 1"),
        (replace(INTERLEAVED, pp=1), "two ranks"),
        (replace(ONE_F_ONE_B, schedule=Schedule.ZERO_BUBBLE), "schedule zero_bubble"),
        (replace(ONE_F_ONE_B, schedule=Schedule.GPIPE), "schedule gpipe"),
        (Layout(cp=2), "cp=2"),
    ],
)
def test_what_pytorchs_schedules_cannot_is_refused_with_the_reason(layout: Layout, words: str) -> None:
    case = Case(adapter="pipeline", layout=layout, workload=LLAMA)
    assert words in (Pipeline.supports(case, "cpu", "gloo") or "")


@pytest.mark.parametrize(
    "options, refused",
    [
        (RunOptions(device="cuda", backend="gloo", num_gpus=2), True),
        (RunOptions(device="cuda", num_gpus=1), True),
        (RunOptions(device="cuda", num_gpus=2), False),
        (RunOptions(), False),
    ],
    ids=["told", "one GPU for both", "nccl", "cpu"],
)
def test_a_pipeline_of_cuda_tensors_over_gloo_is_skipped_before_it_hangs(
    runner: Runner, options: RunOptions, refused: bool, tmp_path: Path
) -> None:
    """The runner knows the backend: gloo also where two ranks share a GPU."""
    elsewhere = Runner(runner.launcher, runner.adapters, options, tmp_path)
    reason = elsewhere.refusal(Case(adapter="pipeline", layout=ONE_F_ONE_B, workload=GPT))
    elsewhere.close()
    assert ("over gloo" in (reason or "")) == refused, reason


def test_gpipe_keeps_to_its_schedule() -> None:
    assert GPipe.capabilities.beyond(ONE_F_ONE_B) == ["schedule 1f1b"]
    assert GPipe.capabilities.beyond(Layout(pp=2, num_micro_batches=4)) == []


def test_the_conformance_suite_runs_it_under_1f1b() -> None:
    assert [case.layout.id for case in plain_cells("pipeline", Pipeline, 2)] == ["pp2.1f1b.mb2"]
