"""Precisions as records: presets, how they are written, and real runs in which one is told from another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.trials import MutantRunner
from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.adapter.single import Single, SingleEngine, reduced_backward
from meshmark.adapters import ADAPTERS
from meshmark.errors import InputError, UnknownNameError
from meshmark.judge.gradient_faults import low_precisions
from meshmark.judge.trace import host_copies
from meshmark.launch.launch import ForkserverLauncher
from meshmark.passes.noise import noise_key
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.reference.data import make_batch
from meshmark.run.runner import Runner, RunOptions
from meshmark.run.verdict import detection_limits
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Dtype, Precision, precision
from meshmark.theory.memory import model_states
from meshmark.theory.traffic import bytes_by_kind, step_traffic
from tests.broken.mutant import GPT, LAYOUTS, VIT_BN
from tests.broken.mutants import BY_NAME, target
from tests.factories import make_case

OLD_RECORDS = Path(__file__).parent / "data" / "schema-1"
"""Records of Meshmark f7fe655."""
NARROW = Precision.BF16_REDUCE_BF16
OF_SUITES = ["ddp_ReduceDtypeForgotten", "fsdp2_ReduceDtypeForgotten"]
RARE = "ddp_LosesRareToken_in_bf16"
OF_CLAUSES = ["ddp_ReduceDtypeForgotten_bf16_reduction", "fsdp2_ReduceDtypeOfAnother_bf16_states"]


def test_presets_stand_under_their_own_names() -> None:
    assert all(precision(name).name == str(preset) == name for name, preset in Precision.PRESETS.items())
    assert {"fp64", "fp32", "bf16", "fp16", "bf16-reduce-bf16"} <= set(Precision.PRESETS)
    with pytest.raises(UnknownNameError, match="unknown precision 'bf61': did you mean 'bf16'"):
        precision("bf61")


def test_what_the_formats_of_a_preset_say_of_it() -> None:
    assert [p.name for p in Precision.PRESETS.values() if p.is_mixed] == ["bf16", "fp16", "bf16-reduce-bf16"]
    assert [p.name for p in Precision.PRESETS.values() if p.narrows_reduction] == ["bf16-reduce-bf16"]
    assert Precision.FP64.wide is Dtype.FP64
    assert dataclasses.replace(NARROW, name="bf16", reduction=Dtype.FP32) == Precision.BF16


def test_another_arithmetic_under_the_name_of_a_preset_is_refused() -> None:
    with pytest.raises(InputError, match="precision 'bf16' is a preset with other arithmetic"):
        dataclasses.replace(NARROW, name="bf16")


@pytest.mark.parametrize("preset", Precision.PRESETS.values(), ids=str)
def test_a_preset_is_written_as_its_name(preset: Precision) -> None:
    case = make_case(precision=preset)
    assert encode(case)["precision"] == preset.name
    assert decode(Case, json.loads(json.dumps(encode(case)))) == case
    assert case.id.endswith(f"-{preset.name}")


def test_one_that_is_no_preset_is_written_field_by_field() -> None:
    own = dataclasses.replace(NARROW, name="bf16-states", states=Dtype.BF16)
    assert encode(own)["states"] == "bfloat16"
    assert decode(Precision, json.loads(json.dumps(encode(own)))) == own


def test_records_written_before_precisions_were_records_are_read() -> None:
    reading = read_records(OLD_RECORDS)
    assert not reading.complaints and len(reading.records) == 2
    assert {record.case.precision for record in reading.records} == {Precision.FP32}


def test_planned_bytes_follow_from_the_reduction_s_format() -> None:
    wide, narrow = (make_case(precision=p, layout=Layout(dp=2, zero_stage=3)) for p in (Precision.BF16, NARROW))
    plans = [bytes_by_kind(step_traffic(case, 0)) for case in (wide, narrow)]
    assert plans[0]["reduce_scatter"] == 2 * plans[1]["reduce_scatter"]
    assert plans[0]["all_gather"] == plans[1]["all_gather"]
    replicas = [bytes_by_kind(step_traffic(make_case(precision=p), 0))["all_reduce"] for p in (Precision.BF16, NARROW)]
    assert replicas[0] == 2 * replicas[1]
    held = [model_states(case, 0) for case in (wide, narrow)]
    assert held[0].gradients == held[1].gradients, "they are held in fp32"


def test_adapters_that_reduce_in_one_way_alone_refuse_with_a_reason() -> None:
    supporting = set()
    for name, path in ADAPTERS.items():
        can = load_adapter(path).capabilities
        assert (NARROW in can.precisions) != bool(can.lacks.get(NARROW)), name
        supporting |= {name} if NARROW in can.precisions else set()
    assert supporting == {"single", "ddp", "fsdp2", "accelerate-fsdp2", "fairscale-fsdp"}


def engine_in(asked: Precision, num_micro_batches: int = 1) -> SingleEngine:
    case = Case(adapter="single", workload=GPT, layout=Layout(num_micro_batches=num_micro_batches), precision=asked)
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=Path())
    engine = Single().build(case, context)
    assert isinstance(engine, SingleEngine)
    return engine


def test_the_tolerance_model_rounds_what_each_rank_sends_and_the_sum() -> None:
    """Bit for bit what two ranks with a half of the batch each would come to."""
    batch, engine = make_batch(GPT, 0), engine_in(NARROW)
    loss = float(reduced_backward(engine, batch, 2))
    found = host_copies(engine.gradients())
    assert "bf16" in low_precisions(iter(found.values()))
    parts, losses = [], []
    for rank in range(2):
        alone = engine_in(NARROW)
        losses.append(float(alone.backward(batch.shard(rank, 2))))
        parts.append({name: gradient.bfloat16() for name, gradient in alone.gradients().items()})
    assert loss == pytest.approx(sum(losses), rel=1e-6)
    assert all((parts[0][name] + parts[1][name]).float().equal(torch.from_numpy(g)) for name, g in found.items())


def test_reduced_after_every_micro_batch_their_sum_is_wide() -> None:
    batch, engine = make_batch(GPT, 0), engine_in(NARROW, num_micro_batches=2)
    engine.cast_weights = True
    reduced_backward(engine, batch, 2)
    assert not low_precisions(iter(host_copies(engine.gradients()).values()))


def test_noise_depends_on_the_number_of_ranks_only_where_they_round() -> None:
    layouts = Layout(dp=2, num_micro_batches=2), Layout(dp=4)
    two, four = (Case(adapter="ddp", workload=GPT, layout=layout, precision=NARROW) for layout in layouts)
    assert noise_key(two, 3) != noise_key(four, 3)
    wide = [noise_key(dataclasses.replace(case, precision=Precision.BF16), 3) for case in (two, four)]
    assert wide[0] == wide[1] != noise_key(two, 3)


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {name: target(name) for name in [*OF_SUITES, RARE]} | {name: ADAPTERS[name] for name in ("ddp", "fsdp2")}
    known |= {"overflows": "tests.loss_scales:OverflowsNowAndThen"}
    running = Runner(launcher, known, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def mutant_runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MutantRunner]:
    running = MutantRunner(
        launcher, {name: target(name) for name in OF_CLAUSES}, tmp_path_factory.mktemp("mutant_runner")
    )
    yield running
    running.close()


def reduced_bytes(record: Record) -> int:
    kinds = {"all_reduce", "reduce_scatter"}
    return sum(c.num_bytes for c in record.traffic.readings[0].asked if c.kind in kinds and c.num_bytes > 1024)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["ddp", "fsdp2"])
def test_bf16_reduced_in_bf16_is_another_precision_than_reduced_in_fp32(runner: Runner, adapter: str) -> None:
    """Both train as they should, each by its own tolerance model, and half the bytes are sent."""
    cases = [
        Case(adapter=adapter, workload=GPT, layout=LAYOUTS[adapter], precision=p) for p in (Precision.BF16, NARROW)
    ]
    wide, narrow = (runner.observe(case) for case in cases)
    for record in (wide, narrow):
        assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"]
        assert max(limit.any_direction for limit in detection_limits(record).values()) < 5e-6, "as in fp32"
    assert reduced_bytes(wide) == 2 * reduced_bytes(narrow)
    assert wide.equivalence.noise != narrow.equivalence.noise
    if adapter == "ddp":  # which reduces once, so that every value is a bf16 number
        assert (wide.memory.state_dtypes["gradients"], narrow.memory.state_dtypes["gradients"]) == ("float32", "bf16")


@pytest.mark.slow
def test_steps_that_loss_scaling_leaves_out_are_timed_too_and_said(runner: Runner) -> None:
    """The clock's steps are not tried again, and so are held against a pass whose are not either."""
    case = Case(adapter="overflows", workload=GPT, layout=LAYOUTS["ddp"], precision=Precision.FP16)
    record = runner.time(case)
    verdict = record.verdict("throughput")
    assert verdict is not None and verdict.passed, record.outcome.message or verdict
    assert verdict.summary.endswith(f"parameters after 2 and {verdict.evidence['steps']} steps")
    told = "steps, warm-up included, overflowed and were left out, as loss scaling does: they moved nothing"
    assert record.remarks == [f"2 of the first 3 {told}"]


@pytest.mark.slow
def test_an_attempt_that_is_left_out_has_been_seen_by_batch_norms(runner: Runner) -> None:
    """Their statistics, and the number of batches, are those of every attempt; all else is that of the last."""
    layout = Layout(dp=2, num_micro_batches=2)
    record = runner.observe(Case(adapter="overflows", workload=VIT_BN, layout=layout, precision=Precision.FP16))
    verdict = record.verdict("equivalence")
    assert record.training.left_out >= 1
    assert verdict is not None and verdict.passed, record.outcome.message or verdict.summary


@pytest.mark.slow
def test_steps_that_loss_scaling_leaves_out_are_tried_again_and_the_run_is_right(runner: Runner) -> None:
    """In the metered step too, whose memory and traffic are those of the step that was taken, and with a learning
    rate that depends on the number of steps."""
    warming = dataclasses.replace(GPT, optimizer=dataclasses.replace(GPT.optimizer, warmup_steps=4))
    case = Case(adapter="overflows", workload=warming, layout=LAYOUTS["ddp"], precision=Precision.FP16)
    record = runner.observe(case)
    summaries = [v.summary for v in record.verdicts]
    assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"], summaries
    assert len(record.training.losses) == 3 and record.training.left_out >= 4
    assert record.remarks[0].startswith(f"{record.training.left_out} attempts at steps that overflowed were left out")


@pytest.mark.slow
def test_a_token_s_gradient_that_one_rank_loses_is_seen_beneath_the_rounding_of_bf16(runner: Runner) -> None:
    record = runner.observe(BY_NAME[RARE].case)
    verdict, diagnosis = record.verdict("equivalence"), record.equivalence.diagnosis
    assert verdict is not None and not verdict.passed, record.outcome.message
    assert diagnosis is not None and diagnosis.fault in BY_NAME[RARE].faults, diagnosis
    assert diagnosis.names == ["embedding.tokens.weight"] and "in 1 of 256 rows" in diagnosis.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_SUITES)
def test_another_format_of_the_reduction_is_caught_by_its_bytes(runner: Runner, name: str) -> None:
    record = runner.observe(BY_NAME[name].case)
    verdict = record.verdict("communication")
    assert verdict is not None and not verdict.passed, record.outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CLAUSES)
def test_another_format_of_the_reduction_fails_its_clause(mutant_runner: MutantRunner, name: str) -> None:
    trial = mutant_runner.attempt(BY_NAME[name])
    assert trial.caught, trial.explanation
