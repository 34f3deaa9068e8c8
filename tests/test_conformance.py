"""Clauses: each judge must be able to fail, and real launches of one adapter keep them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshmark.adapter.registry import builtin_adapters, core_adapters, load_adapter, select
from meshmark.adapters import ADAPTERS, ROSTER
from meshmark.adapters.pipedream import PipeDream
from meshmark.conformance import judges, randomness
from meshmark.conformance.clauses import CLAUSES, judge_clause
from meshmark.conformance.finding import ClauseResult, Finding
from meshmark.conformance.scenario import DROPOUT_STEPS, SCENARIOS, Scenario, plain_cells, plain_workload
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.errors import AdapterError
from meshmark.judge.deviation import Deviation, Drift, Quantity
from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.readings import Bytes
from meshmark.passes.clauses import MESSAGE
from meshmark.passes.observe import MOST_LEFT_OUT
from meshmark.pytest_plugin.plugin import expect_clause
from meshmark.records.record import (
    ConformanceEvidence,
    EquivalenceEvidence,
    Outcome,
    PeerEnd,
    Record,
    Status,
    TrainingCurves,
)
from meshmark.records.record_file import Reading
from meshmark.records.request import Task
from meshmark.report.conformance import columns, write_conformance
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from meshmark.theory.memory import ModelStates
from tests.factories import (
    make_case,
    make_environment,
    make_equivalence,
    make_good,
    make_memory,
    make_memory_evidence,
    make_workload,
)

EXACT = Deviation(distance=0.0, scale=1.0, factor=1.0)
NOISY = Deviation(distance=1e-7, scale=1.0, factor=1.0)
WRONG = Deviation(distance=1e-3, scale=1.0, factor=1.001)


def plain_equivalence(**changes: Any) -> EquivalenceEvidence:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "num_replicated": 4,
        "deviations": {
            Quantity.parse("loss"): [NOISY] * 2,
            Quantity.parse("norm"): [NOISY] * 2,
            Quantity.parse("gradients/head.norm.bias"): [NOISY] * 2,
            Quantity.parse("parameters/head.norm.bias"): [NOISY] * 2,
            Quantity.parse("initial/head.norm.bias"): [EXACT],
        },
        "noise": {
            Quantity.parse("loss"): [1e-7] * 2,
            Quantity.parse("norm"): [1e-7] * 2,
            Quantity.parse("gradients/head.norm.bias"): [1e-7] * 2,
            Quantity.parse("parameters/head.norm.bias"): [1e-7] * 2,
        },
    }
    return make_equivalence(**{**defaults, **changes})


def plain_conformance(**changes: Any) -> ConformanceEvidence:  # noqa: ANN401
    return ConformanceEvidence(**{"scenario": "plain", "base": make_case(), **changes})


def plain(**changes: Any) -> Record:  # noqa: ANN401
    """A good record of the scenario `plain`."""
    return make_good(**{"equivalence": plain_equivalence(), "conformance": plain_conformance(), **changes})


def deviating(written: str, deviation: Deviation = WRONG) -> Record:
    good, quantity = plain_equivalence().deviations, Quantity.parse(written)
    return plain(equivalence=plain_equivalence(deviations={**good, quantity: [deviation] * len(good[quantity])}))


@pytest.mark.parametrize(
    "judge, quantity",
    [
        (judges.loss, "loss"),
        (judges.gradients, "gradients/head.norm.bias"),
        (judges.parameters, "parameters/head.norm.bias"),
        (judges.parameters, "initial/head.norm.bias"),
    ],
)
def test_a_quantity_beyond_its_noise_fails_its_clause_alone(judge: judges.Judge, quantity: str) -> None:
    assert judge(plain()).result is ClauseResult.PASS
    assert judge(deviating(quantity)).result is ClauseResult.FAIL
    for other in {"loss", "gradients/head.norm.bias"} - {quantity}:
        assert judge(deviating(other)).result is ClauseResult.PASS


def test_replicas_must_be_equal_and_must_have_been_compared() -> None:
    assert judges.replicas(plain()).result is ClauseResult.PASS
    apart = plain(
        equivalence=plain_equivalence(
            drifts=[Drift(quantity=Quantity.parse("parameters/head.norm.bias"), step=1, ranks=[1])]
        )
    )
    assert judges.replicas(apart).result is ClauseResult.FAIL
    assert judges.replicas(plain(equivalence=plain_equivalence(num_replicated=0))).result is ClauseResult.UNSUPPORTED


def test_clipping_must_have_been_active() -> None:
    """The gradient's norm is 1 in these records."""
    assert judges.clipping(plain()).result is ClauseResult.PASS
    assert judges.clipping(deviating("norm")).result is ClauseResult.FAIL
    inactive = plain(case=make_case(workload=make_workload(optimizer=make_optimizer(clip_norm=2.0))))
    assert "norms of 1 to 1, and none is clipped to 2" in judges.clipping(inactive).evidence
    assert judges.clipping(inactive).result is ClauseResult.UNSUPPORTED, "no fault of the adapter"


def make_optimizer(**changes: Any) -> Any:  # noqa: ANN401
    return dataclasses.replace(make_workload().optimizer, **changes)


def test_tokens_must_have_been_uneven() -> None:
    """Where every micro-batch has as many, a wrong weighing does not show."""
    masked, whole = (SCENARIOS[name].varied(DDP)[0] for name in ("uneven", "accumulation"))
    assert judges.uneven(plain(case=masked)).result is ClauseResult.PASS
    tokens = whole.workload.tokens_per_step // (whole.layout.dp * whole.layout.num_micro_batches)
    assert failing(judges.uneven(plain(case=whole))) == f"{tokens} to {tokens} tokens a micro-batch"


def test_frozen_parameters_must_stay_bit_for_bit() -> None:
    """Even a move within the noise is one."""
    case = make_case(workload=make_workload(frozen=("head.",)))
    verdicts = plain().verdicts
    still = deviating("parameters/head.norm.bias", EXACT)
    assert judges.frozen(dataclasses.replace(still, case=case, verdicts=verdicts)).result is ClauseResult.PASS
    assert judges.frozen(dataclasses.replace(plain(), case=case, verdicts=verdicts)).result is ClauseResult.FAIL
    assert judges.frozen(plain(case=make_case())).result is ClauseResult.FAIL, "nothing was frozen"


def test_masters_and_moments_must_be_wide() -> None:
    narrow = {"parameters": "bfloat16", "optimizer_states": "float32"}
    assert judges.masters(plain()).result is ClauseResult.PASS
    assert judges.masters(plain(memory=make_memory_evidence(state_dtypes=narrow))).result is ClauseResult.FAIL
    assert judges.declared_precision(plain()).result is ClauseResult.PASS
    one_wide = {"parameters": "bfloat16+float32", "masters": "bf16+float32", "optimizer_states": "float32"}
    assert "values of parameters are bf16+float32 numbers" in failing(
        judges.masters(plain(memory=make_memory_evidence(state_dtypes=one_wide)))
    )
    moments = {"parameters": "bfloat16+float32", "optimizer_states": "bfloat16"}
    assert (
        judges.declared_precision(plain(memory=make_memory_evidence(state_dtypes=moments))).result is ClauseResult.FAIL
    )


def test_gradients_may_be_bf16_numbers_where_nothing_is_summed() -> None:
    """Cast weights make them so; a sum of several in float32 is none but by rounding."""
    rounded = make_memory_evidence(state_dtypes={"gradients": "bf16", "optimizer_states": "float32"})

    def judged(layout: Layout) -> ClauseResult:
        case = make_case(layout=layout, precision=Precision.BF16)
        return judges.declared_precision(plain(case=case, memory=rounded)).result

    assert judged(Layout(tp=2)) is ClauseResult.PASS
    assert judged(Layout(dp=2)) is ClauseResult.FAIL
    assert judged(Layout(tp=2, num_micro_batches=2)) is ClauseResult.FAIL
    case = make_case(layout=Layout(tp=2), precision=Precision.BF16)
    sharper = plain(case=case, memory=rounded)
    sharper = dataclasses.replace(
        sharper, equivalence=dataclasses.replace(sharper.equivalence, rounded=["head.norm.bias"])
    )
    assert "where the twin's are not: 1, as head.norm.bias" in failing(judges.declared_precision(sharper))


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "not planned"])
def test_recomputation_must_spare_activations_on_every_rank_of_any_device(planned: bool) -> None:
    """Also where no plan of activations is judged, as on a GPU: what both runs held is there."""

    def holding(planned_bytes: float, *activations: int) -> Record:
        readings = [dataclasses.replace(make_memory(), held=Bytes(activations=held)) for held in activations]
        states = ModelStates(
            parameters=400, gradients=400, optimizer_states=800, activations=planned_bytes if planned else None
        )
        evidence = make_memory_evidence(readings=readings, planned=[states, states])
        return plain(memory=evidence, environment=make_environment(device="cuda"))

    kept = holding(1000.0, 1000, 1000)
    assert judges.recomputes(kept, holding(400.0, 400, 690)).result is ClauseResult.PASS
    assert "rank 1 spares 0 bytes of 1,000" in failing(judges.recomputes(kept, holding(400.0, 400, 1000)))
    little = judges.recomputes(kept, holding(400.0, 400, 710)).result
    assert little is (ClauseResult.FAIL if planned else ClauseResult.PASS), "half of what it should"
    if planned:  # blocks so small that the random state of a checkpoint is larger than what it spares
        assert judges.recomputes(kept, holding(1500.0, 1500, 1990)).result is ClauseResult.PASS
        assert "spares -1,010 bytes" in failing(judges.recomputes(kept, holding(1500.0, 1500, 2010)))
    unread = plain(memory=make_memory_evidence(readings=[]))
    assert "not read" in failing(judges.recomputes(unread, unread))


def dropped(first: np.ndarray, second: np.ndarray, evaluation: float = 5.0, size: float = 1.3) -> Record:
    draw = np.random.default_rng(9)
    samples = {
        "losses": list(first),
        "reference": list(draw.normal(5.2, 0.01, 96)),
        "evaluation": [evaluation],
        "exact": [5.0],
        "along": list(draw.normal(1.0, 0.01, len(first))),
        "size": list(draw.normal(size, 0.02, len(first))),
        "reference_along": list(draw.normal(1.0, 0.01, 96)),
        "reference_size": list(draw.normal(1.3, 0.02, 96)),
    }
    return plain(task=Task.DROPOUT, conformance=plain_conformance(samples=[samples, {"losses": list(second)}]))


def test_dropout_must_be_fresh_different_as_strong_and_off_in_evaluation() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.normal(5.2, 0.01, (2, DROPOUT_STEPS))
    assert randomness.dropout(dropped(a, b)).result is ClauseResult.PASS
    assert "twice on a rank" in failing(randomness.dropout(dropped(np.full_like(a, 5.2), b)))
    off = np.concatenate([a[: DROPOUT_STEPS // 2], np.full(DROPOUT_STEPS // 2, 5.0)])
    stays = "no dropout from step 12 on: it stays off after the evaluation"
    assert stays in failing(randomness.dropout(dropped(off, b)))
    assert "equal on different" in failing(randomness.dropout(dropped(a, a)))
    assert "mean" in failing(randomness.dropout(dropped(a + 0.02, b + 0.02)))
    assert "spread" in failing(randomness.dropout(dropped(5.2 + (a - 5.2) / 9, 5.2 + (b - 5.2) / 9)))
    assert "evaluation" in failing(randomness.dropout(dropped(a, b, evaluation=5.2)))
    assert "gradients" in failing(randomness.dropout(dropped(a, b, size=1.5)))


def test_recomputed_dropout_must_have_the_forward_passs_masks() -> None:
    kept = plain(
        task=Task.DROPOUT,
        training=TrainingCurves(losses=[5.1, 5.2, 5.3]),
        conformance=plain_conformance(samples=[{"along": [0.98, 1.1, 1.0], "size": [1.3] * 3}, {}]),
    )
    same = plain(
        task=Task.DROPOUT,
        training=TrainingCurves(losses=[5.1, 5.4]),
        conformance=plain_conformance(samples=[{"along": [0.98, 0.9], "size": [1.3, 1.2]}, {}]),
    )
    other = plain(
        task=Task.DROPOUT,
        training=TrainingCurves(losses=[5.1, 5.2]),
        conformance=plain_conformance(samples=[{"along": [0.97, 1.1], "size": [1.3, 1.3]}, {}]),
    )
    elsewhere = plain(
        task=Task.DROPOUT,
        training=TrainingCurves(losses=[5.2, 5.2]),
        conformance=plain_conformance(samples=same.conformance.samples),
    )
    assert randomness.draws_again(kept, same).result is ClauseResult.PASS  # later steps are others' business
    assert "gradients" in failing(randomness.draws_again(kept, other))
    assert "loss" in failing(randomness.draws_again(kept, elsewhere))


def failing(finding: Finding) -> str:
    assert finding.result is ClauseResult.FAIL
    return finding.evidence


def test_overflows_after_which_no_step_is_taken_are_told() -> None:
    still = plain_conformance(samples=[{"moved": [0.0]}, {"moved": [0.0]}])
    stuck = TrainingCurves(losses=[5.1, 5.2, 5.3], left_out=2 * MOST_LEFT_OUT)
    told = failing(judges.overflow(plain(task=Task.OVERFLOW, conformance=still, training=stuck)))
    assert "48 attempts at later steps overflow as well, and none is taken" in told
    once = dataclasses.replace(stuck, left_out=1)
    assert judges.overflow(plain(task=Task.OVERFLOW, conformance=still, training=once)).result is ClauseResult.PASS


def test_a_precision_that_is_asked_for_is_each_clause_s() -> None:
    """All but those about a precision, and about dropout, whose losses are compared as those of one precision."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites/test_conformance.py",
        "--collect-only",
        "-q",
        "-p",
        "no:benchmark",
    ]
    asked = ["--adapters", "ddp", "--precision", "fp32,bf16", "-k", "resume"]
    listed = subprocess.run([*command, *asked], cwd=Path(__file__).parent.parent, capture_output=True, text=True).stdout
    assert "[ddp-dp2-resume]" in listed and "[ddp-dp2-bf16-resume]" in listed, listed
    low = dataclasses.replace(DDP, precision=Precision.BF16)
    varied = {name: scenario.varied(low)[0].precision for name, scenario in SCENARIOS.items()}
    assert {name for name, precision in varied.items() if precision != Precision.BF16} == {
        "bf16 reduction", "fp16", "dropout", "recomputed dropout",
    }  # fmt: skip


def test_an_overflowing_step_must_move_nothing_anywhere() -> None:
    assert (
        judges.overflow(plain(conformance=plain_conformance(samples=[{"moved": [0.0]}] * 2))).result
        is ClauseResult.PASS
    )
    assert (
        judges.overflow(plain(conformance=plain_conformance(samples=[{"moved": [0.0]}, {"moved": [3.0]}]))).result
        is ClauseResult.FAIL
    )


def test_memory_must_not_grow_on_any_rank() -> None:
    settled = [1e6 + 5e4 * (step < 5) for step in range(50)]
    leaking = [1e6 + 1e4 * step for step in range(50)]
    assert (
        judges.endures(plain(steps=50, conformance=plain_conformance(samples=[{"live_bytes": settled}] * 2))).result
        is ClauseResult.PASS
    )
    found = judges.endures(
        plain(steps=50, conformance=plain_conformance(samples=[{"live_bytes": settled}, {"live_bytes": leaking}]))
    )
    assert "+10,000 ± 0 bytes a step" in failing(found)
    slow = [1e6 + 1024 * step + 3e4 * (step % 5 == 1) for step in range(50)]
    assert "+1,024" in failing(
        judges.endures(plain(steps=50, conformance=plain_conformance(samples=[{"live_bytes": slow}])))
    )


def test_a_buffer_that_comes_once_is_no_growth() -> None:
    once = [1e6 + 3e4 * (step >= 30) for step in range(50)]
    found = judges.endures(plain(steps=50, conformance=plain_conformance(samples=[{"live_bytes": once}])))
    assert found.result is ClauseResult.PASS


def test_determinism_is_told_and_counts_neither_as_kept_nor_as_broken(tmp_path: Path) -> None:
    first, same, other = (
        plain(conformance=plain_conformance(scenario=scenario, digests=list(digests)))
        for scenario, digests in (("schedule", "abc"), ("save", "abc"), ("save", "abx"))
    )
    told = [judges.deterministic(first, second) for second in (same, other)]
    assert [finding.result for finding in told] == [ClauseResult.TOLD] * 2
    assert "bitwise equal" in told[0].evidence and "differs from step 1" in told[1].evidence
    write_conformance(Reading(records=[first, other], complaints=[]), tmp_path / "page.md", "meshmark report")
    page = (tmp_path / "page.md").read_text()
    assert "**1 of 1 cell holds**" in page, "the schedule's: nothing was resumed"
    assert "1 more tell what is not required" in page
    header, _, row = (line.split() for line in page.partition("## Every cell")[2].strip().splitlines()[:3])
    assert dict(zip(header, row, strict=True))["determinism"] == "reported"
    with pytest.raises(pytest.skip.Exception, match="reported, not required: two runs: differs"):
        expect_clause(Standing({"schedule": first, "save": other}), first.case, CLAUSES["determinism"])


def test_an_error_must_come_home_from_the_rank_that_raised_it() -> None:
    def ended(**outcome: Any) -> Finding:  # noqa: ANN401
        return judges.ends(plain(outcome=Outcome(**outcome), conformance=plain_conformance(scenario="error")))

    message = f"RuntimeError: {MESSAGE}"
    assert ended(status=Status.RAISED, rank=1, message=message).result is ClauseResult.PASS
    for status, rank, told in ((Status.HUNG, 0, "no end"), (Status.RAISED, 0, message), (Status.RAISED, 1, "peer")):
        assert ended(status=status, rank=rank, message=told).result is ClauseResult.FAIL
    assert ended(status=Status.OK).result is ClauseResult.FAIL, "nothing was raised"


def test_peers_of_an_error_must_end_by_themselves_and_how_long_they_took_is_told() -> None:
    def ended(backend: str, *peers: PeerEnd) -> Finding:
        outcome = Outcome(status=Status.RAISED, rank=1, message=f"RuntimeError: {MESSAGE}", peers=list(peers))
        return judges.ends(plain(outcome=outcome, environment=make_environment(backend=backend)))

    heard = ended("gloo", PeerEnd(rank=0, kind="raised", seconds=0.34))
    assert heard.result is ClauseResult.PASS and "rank 0 ended by itself 0.3 s later (raised)" in heard.evidence
    hung = PeerEnd(rank=0, kind="ended")
    assert "ranks [0] went on until the launcher ended them" in failing(ended("gloo", hung))
    assert "rank 0 was ended" in ended("nccl", hung).evidence
    killed = ended("gloo", PeerEnd(rank=0, kind="killed", seconds=0.2))
    assert killed.result is ClauseResult.PASS and "was ended 0.2 s later (killed)" in killed.evidence, "by torchrun"


GAP = KnownGap(clause="loss", reason="it is so", symptom="loss at step", link="there")


def test_a_known_gap_is_the_known_failure_and_no_other() -> None:
    wrong = dataclasses.replace(deviating("loss"), conformance=plain_conformance(known_gaps=[GAP]))
    found = judge_clause(CLAUSES["loss"], {"plain": wrong})
    assert (found.result, found.link) == (ClauseResult.KNOWN_GAP, "there") and "it is so" in found.evidence
    raised = plain(
        outcome=Outcome(status=Status.RAISED, rank=0, message="other"), conformance=plain_conformance(known_gaps=[GAP])
    )
    assert judge_clause(CLAUSES["loss"], {"plain": raised}).result is ClauseResult.FAIL
    assert (
        judge_clause(CLAUSES["loss"], {"plain": plain(conformance=plain_conformance(known_gaps=[GAP]))}).result
        is ClauseResult.STALE_GAP
    )
    elsewhere = dataclasses.replace(GAP, zero_stages=(3,))
    assert (
        judge_clause(CLAUSES["loss"], {"plain": plain(conformance=plain_conformance(known_gaps=[elsewhere]))}).result
        is ClauseResult.PASS
    )


def test_what_was_not_run_or_not_finished_is_no_pass() -> None:
    skipped = plain(outcome=Outcome(status=Status.SKIPPED, message="not installed"))
    assert judge_clause(CLAUSES["loss"], {"plain": skipped}).result is ClauseResult.UNSUPPORTED
    hung = plain(outcome=Outcome(status=Status.HUNG, rank=1, message="no end"))
    assert "hung on rank 1" in failing(judge_clause(CLAUSES["loss"], {"plain": hung}))


def test_an_adapter_whose_algorithms_take_no_adamw_is_given_their_optimizer() -> None:
    class PlainSteps(PipeDream):
        capabilities = dataclasses.replace(PipeDream.capabilities, algorithms=frozenset({"pipedream"}))

    class NoPreset(PipeDream):
        capabilities = dataclasses.replace(PipeDream.capabilities, algorithms=frozenset({"of nobody"}))

    cells = [cell for cell in plain_cells("plain", PlainSteps, 2) if isinstance(cell, Case)]
    assert cells and {cell.workload.optimizer.kind for cell in cells} == {OptimizerKind.SGD}
    assert all("-sgd-pipedream" in cell.workload.name for cell in cells)
    with pytest.raises(AdapterError, match="NoPreset trains by of nobody: no preset of these works with"):
        plain_cells("none", NoPreset, 2)


def test_every_clause_stands_on_scenarios_and_every_scenario_serves_a_clause() -> None:
    used = {name for clause in CLAUSES.values() for name in clause.scenarios}
    assert used == set(SCENARIOS)


def test_the_cases_of_an_adapter_cover_its_stages_and_axes() -> None:
    def layouts(name: str) -> list[str]:
        return [case.layout.id for case in plain_cells(name, load_adapter(ADAPTERS[name]), 2)]

    assert layouts("deepspeed") == ["dp2.zero1", "dp2.zero2", "dp2.zero3"]
    assert layouts("megatron") == ["tp2"]
    assert layouts("gpipe") == ["pp2.mb2"]
    assert layouts("single") == ["one"]


def test_what_an_adapter_refuses_plain_is_asked_of_it_crossed() -> None:
    """Its every clause was "unsupported", for a layout that it was never made for."""

    def layouts(name: str, world: int) -> list[str]:
        return [case.layout.id for case in plain_cells(name, load_adapter(ROSTER[name]), world)]

    assert layouts("deepspeed-ulysses", 2) == ["cp2.zero1", "cp2.zero2", "cp2.zero3"]
    assert layouts("deepspeed-autotp", 4) == ["dp2.tp2.zero1"]
    assert layouts("pipeline-tp", 4) == ["tp2.pp2.1f1b.mb4"]
    assert layouts("fsdp2-hsdp", 4) == ["dp4.zero3"]
    for name in ("megatron-gpt-zero1", "megatron-gpt-recommended"):
        assert layouts(name, 2) == ["dp2.zero1"], "it takes replicas, which were not asked of it"
    assert layouts("deepspeed-ulysses", 16) == ["dp4.cp4.zero1", "dp4.cp4.zero2", "dp4.cp4.zero3"]
    assert layouts("tp-fsdp2", 2) == ["tp2.zero3"], "on two ranks there is nothing else, and the refusal says why"


def test_make_roster_asks_every_clause_on_as_many_ranks_as_an_adapter_takes() -> None:
    wide, other = tomllib.loads(Path("benchmarks/roster_clauses.toml").read_text())["cases"]
    core = core_adapters()
    worlds = {name: 4 for name in select(wide["adapters"], builtin_adapters(), core)}
    worlds |= {name: 2 for name in select(other["adapters"], builtin_adapters(), core)}
    assert worlds.keys() == ROSTER.keys() and wide["world"] == 4 and "world" not in other
    for name, path in ROSTER.items():
        adapter, world = load_adapter(path), worlds[name]
        cases = [case for case in plain_cells(name, adapter, world) if isinstance(case, Case)]
        refusals = [adapter.supports(case, "cpu", "gloo") for case in cases]
        # The second of models as small as a scenario's, the third of any that is not of Transformers.
        # Scenarios are of fp32 and AdamW: adapters of 16 bits alone, or of Muon alone, are judged by the suites.
        elsewhere = (
            "is not built",
            "swaps nothing under",
            "trains models of Transformers alone",
            "does not support precision fp32",
            "takes Muon",
            "takes several ranks a sequence",  # and 16 bits alone, where it does
            "takes stages of which the first or the last differs",  # of more layers than a scenario's model has
        )
        assert any(r is None or any(why in r for why in elsewhere) for r in refusals), f"{name}: {refusals}"


def test_on_two_ranks_the_workload_is_the_plain_one() -> None:
    """So that records of before can be compared."""
    for name, target in ADAPTERS.items():
        for cell in plain_cells(name, load_adapter(target), 2):
            own = dataclasses.replace(plain_workload(), name=cell.workload.name, algorithm=cell.workload.algorithm)
            assert cell.workload == own
            assert (cell.workload == plain_workload()) == (name != "post-local-sgd")


@pytest.mark.parametrize("world", [1, 4, 8, 16])
def test_every_scenario_fits_the_workload_of_its_world(world: int) -> None:
    for name, target in ADAPTERS.items():
        for case in plain_cells(name, load_adapter(target), world):
            assert isinstance(case, Case), case
            assert not {s.name: why for s in SCENARIOS.values() if (why := s.varied(case)[1])}
            assert (case.workload.name == "gpt-mini") == (case.workload == plain_workload())


def test_a_scenario_whose_optimizer_an_algorithm_does_not_know_is_refused_with_that_reason() -> None:
    """It was an error of the whole run."""
    case = Case(adapter="pipedream", workload=workload("gpt-mini-sgd-pipedream"), layout=Layout(pp=2))
    refused = {s.name: why for s in SCENARIOS.values() if (why := s.varied(case)[1])}
    assert "pipedream is defined on plain SGD" in refused["clipping"]
    assert "accumulation" not in refused


def test_a_scenario_that_does_not_fit_is_skipped_with_its_reason(runner: Runner) -> None:
    """Six sequences are what two ranks share, and not what they share in four micro-batches."""
    (base,) = plain_cells("ddp", load_adapter(ADAPTERS["ddp"]), 2, global_batch=6)
    assert isinstance(base, Case) and base.workload.name == "gpt-mini.b6"
    found = judge_clause(
        CLAUSES["accumulation"], {"accumulation": ScenarioRunner(runner).perform(SCENARIOS["accumulation"], base)}
    )
    assert found.result is ClauseResult.UNSUPPORTED
    assert "6 sequences is not divisible by dp 2 x 4 micro-batches" in found.evidence


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    running = Runner(launcher, ADAPTERS, RunOptions(), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


DDP = plain_cells("ddp", load_adapter(ADAPTERS["ddp"]), 2)[0]
LAUNCHED = [
    "unused",
    "dropout",
    "resume",
    "reshard",
    "recovery",
    "error",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("schedule", "fp16 overflow")),
]


@pytest.mark.parametrize("name", LAUNCHED)
def test_ddp_keeps(runner: Runner, name: str) -> None:
    records = {
        scenario: ScenarioRunner(runner).perform(SCENARIOS[scenario], DDP) for scenario in CLAUSES[name].scenarios
    }
    found = judge_clause(CLAUSES[name], records)
    assert found.result is ClauseResult.PASS, found.evidence


def test_a_feature_that_is_lacking_is_an_answer(runner: Runner) -> None:
    single = Case(adapter="single", workload=DDP.workload, layout=Layout())
    record = ScenarioRunner(runner).perform(SCENARIOS["error"], single)
    assert record.outcome.status is Status.RAISED
    reshard = {name: ScenarioRunner(runner).perform(SCENARIOS[name], single) for name in CLAUSES["reshard"].scenarios}
    found = judge_clause(CLAUSES["reshard"], reshard)
    assert found.result is ClauseResult.UNSUPPORTED and "one rank alone" in found.evidence


class Standing(ScenarioRunner):
    """Launches nothing: `records` are what came of the scenarios."""

    def __init__(self, records: dict[str, Record]) -> None:
        self.records, self.scenarios = records, SCENARIOS
        self._judged = {}

    def perform(self, scenario: Scenario, base: Case) -> Record:
        return self.records[scenario.name]


def test_a_scenario_that_failed_outside_its_ranks_is_no_verdict_and_no_known_gap() -> None:
    """Its cells stay empty, and its tests fail, whatever the adapter says of its framework's gaps."""
    gap = KnownGap(clause="loss", reason="it is so", symptom="disk", link="")
    broken = plain(
        outcome=Outcome(status=Status.UNFINISHED, message="no space on the disk"),
        conformance=plain_conformance(known_gaps=[gap]),
    )
    assert columns([broken])[0].findings == {}

    with pytest.raises(pytest.fail.Exception, match="unfinished: no space on the disk") as failed:
        expect_clause(Standing({"plain": broken}), broken.case, CLAUSES["loss"])
    assert not isinstance(failed.value, pytest.xfail.Exception)


def test_the_page_has_every_cell_and_why_where_it_is_no_plain_yes(tmp_path: Path) -> None:
    wrong = dataclasses.replace(
        deviating("loss"),
        conformance=plain_conformance(known_gaps=[GAP], base=make_case("fsdp2")),
        case=make_case("fsdp2"),
    )
    reading = Reading(records=[plain(), wrong], complaints=[])
    found = columns(reading.records)
    assert [c.title for c in found] == ["ddp", "fsdp2"]
    assert set(found[0].findings) == {name for name, c in CLAUSES.items() if c.scenarios == ("plain",)}
    write_conformance(reading, tmp_path / "page.md", "meshmark report")
    page = (tmp_path / "page.md").read_text()
    assert "1 known gap," in page and "| gap 1 " in page and "1. **fsdp2 (loss)**: " in page and "it is so" in page
    cells = {
        line.split()[1]: line.count("| yes ") for line in page.splitlines() if line.startswith(("| ddp", "| fsdp2"))
    }
    assert cells == {
        name: sum(f.result is ClauseResult.PASS for f in c.findings.values())
        for name, c in zip(cells, found, strict=True)
    }
    assert re.search(r"^\| ddp +\| dp2.mb2 +\|", page, re.M) and "what decided memory" not in page, (
        "it is in the records"
    )
