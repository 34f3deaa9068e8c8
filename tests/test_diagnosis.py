"""Every class of defect, doctored into the trace of an honest run: what it is, from which step on, and where."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from meshmark.adapter.engine import RankContext
from meshmark.adapter.single import Single
from meshmark.judge.deviation import Drift, Quantity, QuantityKind, global_norm
from meshmark.judge.diagnosis import diagnose, first_drift
from meshmark.judge.evaluation_faults import explain_evaluation
from meshmark.judge.failed_step import FailedStep, Stopwatch
from meshmark.judge.faults import Diagnosis, Fault, named_factor
from meshmark.judge.function_faults import _SEEN_BY_PART, _apart_in_backward, _causal_in_part
from meshmark.judge.gradient_faults import _clipped_shares, _is_by_chance, nobody_reduced
from meshmark.judge.partial_faults import describe_region
from meshmark.judge.tolerance_model import ToleranceModel, fit, noise_run
from meshmark.judge.trace import Trace, drifts_between, host_copies
from meshmark.judge.truth import ExactOptimizer, assess, exact_gradients, exact_loss
from meshmark.judge.update_faults import _counted_otherwise, explain_updates, replay
from meshmark.judge.update_hypotheses import _TakesMoments, update_hypotheses
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from tests.factories import make_case, make_workload

STEPS = 3
CASE = make_case(workload=make_workload(global_batch=8), layout=Layout(dp=2, num_micro_batches=2))
WEIGHT = "blocks.0.feed_forward.up.weight"


@pytest.fixture(autouse=True)
def without_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine leaves no search out."""
    monkeypatch.setattr("meshmark.judge.failed_step._SEARCH_SECONDS", 1e4)


@cache
def honest() -> tuple[Trace, ToleranceModel]:
    """One run of `single`, and a tolerance model on it alone, three times as far."""
    case = dataclasses.replace(CASE, layout=Layout())
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=Path())
    engine = Single().build(case, context)
    trace = Trace(parameters=[host_copies(engine.parameters())])
    for step in range(STEPS):
        trace.losses.append(float(engine.backward(make_batch(case.workload, step))))
        trace.gradients.append(host_copies(engine.gradients()))
        norm = engine.update()
        trace.norms.append(None if norm is None else float(norm))
        trace.parameters.append(host_copies(engine.parameters()))
    return trace, fit([noise_run(assess(trace, case.workload), case.precision)] * 2)


def examine(doctor: Callable[[Trace], None], drifts: tuple[Drift, ...] = (), case: Case = CASE) -> Diagnosis | None:
    trace, tolerance_model = honest()
    trace = copy.deepcopy(trace)
    doctor(trace)
    return diagnose(case, trace, assess(trace, case.workload), drifts, tolerance_model)


def found(doctor: Callable[[Trace], None], fault: Fault, step: int, *drifts: Drift) -> Diagnosis:
    diagnosis = examine(doctor, drifts)
    assert diagnosis is not None
    assert (diagnosis.fault, diagnosis.step) == (fault, step), diagnosis.text
    return diagnosis


def gradients(trace: Trace, step: int, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Change a step's gradients, and make of them the update that an optimizer would have made."""
    trace.gradients[step] = {n: change(n, g).astype(np.float32) for n, g in trace.gradients[step].items()}
    trace.norms = [None] * STEPS


def truth(trace: Trace, step: int, rows: slice, parameters: int | None = None) -> dict[str, np.ndarray]:
    """Return the exact gradients of some sequences of a step's batch."""
    batch = make_batch(CASE.workload, step).rows(rows.start, rows.stop)
    return exact_gradients(CASE.workload, trace.parameters[step if parameters is None else parameters], batch).gradients


def test_an_honest_run_has_no_diagnosis() -> None:
    assert examine(lambda trace: None) is None


@pytest.mark.parametrize(
    "factor, name",
    [
        (0.5, "1/dp = 1/num_micro_batches (a layout in which these differ tells which)"),
        (4, "dp x num_micro_batches"),
        (3, "3"),
    ],
)
def test_a_constant_factor_is_named(factor: float, name: str) -> None:
    diagnosis = found(lambda t: gradients(t, 1, lambda n, g: g * factor), Fault.SCALED, 1)
    assert name in diagnosis.detail
    assert diagnosis.num_names > 20


def test_one_tensor_scaled_by_little_is_found_alone() -> None:
    diagnosis = found(lambda t: gradients(t, 1, lambda n, g: g * (1 + 1e-4 * (n == WEIGHT))), Fault.SCALED, 1)
    assert diagnosis.names == [WEIGHT]
    assert diagnosis.detail.startswith("1.0001 ") or diagnosis.detail.startswith("1.0000999")


@pytest.mark.parametrize("factor, words", [(1.0, "holds the gradient of"), (0.25, "holds 0.25")])
def test_gradients_that_are_summed_as_if_tied_are_told_with_their_partner(factor: float, words: str) -> None:
    one, other = "blocks.0.attention.q.weight", "blocks.1.attention.q.weight"

    def doctor(trace: Trace) -> None:
        right = trace.gradients[1]
        partner = {one: factor * right[other], other: factor * right[one]}
        gradients(trace, 1, lambda n, g: g + partner.get(n, 0.0))

    diagnosis = found(doctor, Fault.BACKWARD, 1)
    assert words in diagnosis.detail and f"the gradient of {other} besides its own" in diagnosis.detail
    assert f"the gradient of {one} besides its own" in diagnosis.detail


def test_one_ranks_own_part_is_a_missing_reduction_where_replicas_drift() -> None:
    drift = Drift(quantity=Quantity.parse(f"gradients/{WEIGHT}"), step=1, ranks=[1])
    diagnosis = found(
        lambda t: gradients(t, 1, lambda n, g: 2 * truth(t, 1, slice(0, 4))[n]), Fault.NOT_REDUCED, 1, drift
    )
    assert diagnosis.ranks == [1]
    assert "data-parallel ranks [0] alone" in diagnosis.detail


@pytest.mark.parametrize("other, ranks", [(slice(4, 8), []), (slice(0, 8), [1])])
def test_no_rank_reduced_is_told_from_one_that_did_not(other: slice, ranks: list[int]) -> None:
    """By what the other rank holds: its own part alone, or the whole."""
    drift = Drift(quantity=Quantity.parse(f"gradients/{WEIGHT}"), step=1, ranks=[1])

    def doctor(trace: Trace) -> None:
        gradients(trace, 1, lambda n, g: 2 * truth(trace, 1, slice(0, 4))[n])
        trace.drifted = {1: {WEIGHT: truth(trace, 1, other)[WEIGHT].astype(np.float32)}}

    diagnosis = found(doctor, Fault.NOT_REDUCED, 1, drift)
    assert diagnosis.ranks == ranks
    told = (
        "no rank reduced, each holds the part of one data-parallel rank alone: rank 0 that of 0, rank 1 that of 1; on "
    )
    assert diagnosis.detail.startswith("the part of data-parallel ranks [0] alone" if ranks else told)


@pytest.mark.parametrize("other, alone", [(slice(2, 4), True), (slice(2, 6), False)])
def test_a_rank_that_reduced_with_some_is_not_one_that_did_not(other: slice, alone: bool) -> None:
    """The second of four ranks holds its own part or, reduced within a node, two."""
    trace = copy.deepcopy(honest()[0])
    trace.gradients[1] = truth(trace, 1, slice(0, 2))
    trace.drifted = {1: {WEIGHT: truth(trace, 1, other)[WEIGHT]}}
    case = dataclasses.replace(CASE, layout=Layout(dp=4))
    assert (nobody_reduced(case, trace, 1) is not None) == alone


def test_the_same_without_drift_and_scale_is_a_part_left_out() -> None:
    diagnosis = found(lambda t: gradients(t, 1, lambda n, g: truth(t, 1, slice(0, 4))[n]), Fault.DROPPED, 1)
    assert "4 of 8 sequences" in diagnosis.detail


def test_a_mean_of_means_is_told_from_other_weights() -> None:
    def mean_of_means(trace: Trace) -> None:
        batch = make_batch(CASE.workload, 1)
        tokens = [int((part.targets >= 0).sum()) for part in batch.micro_batches(2)]
        parts = [truth(trace, 1, slice(0, 4)), truth(trace, 1, slice(4, 8))]
        weights = [batch.total_weight / 2 / count for count in tokens]
        gradients(trace, 1, lambda n, g: sum(w * p[n] for w, p in zip(weights, parts, strict=True)))

    assert "means of 2 ranks" in found(mean_of_means, Fault.UNEVEN, 1).detail


def test_ranks_that_read_other_ranks_rows_are_told_from_a_part_that_is_left_out() -> None:
    case = dataclasses.replace(CASE, layout=Layout(dp=4))

    def twice(trace: Trace) -> None:
        part = truth(trace, 1, slice(0, 4))
        gradients(trace, 1, lambda n, g: 2 * part[n])
        trace.losses[1] *= 1.01  # of those rows alone

    diagnosis = examine(twice, case=case)
    assert diagnosis and diagnosis.fault is Fault.DROPPED, diagnosis
    assert "as where data-parallel ranks [2, 3] read the sequences of [0, 1], which count 2 times" in diagnosis.detail


@pytest.mark.parametrize(
    "rows, words",
    [
        (slice(4, 8), "data-parallel rank 1 counts 0.999 times"),
        (slice(4, 6), "micro-batch 0 of data-parallel rank 1 counts 0.999 times"),
    ],
)
def test_a_weight_of_one_rank_is_no_mean_of_means(rows: slice, words: str) -> None:
    case = dataclasses.replace(CASE, layout=dataclasses.replace(CASE.layout, num_micro_batches=2))

    def lighter(trace: Trace) -> None:
        part = truth(trace, 1, rows)
        gradients(trace, 1, lambda n, g: g - 0.001 * part[n])

    diagnosis = examine(lighter, case=case)
    assert diagnosis and diagnosis.fault is Fault.UNEVEN and words in diagnosis.detail, diagnosis
    assert "mean of the means" not in diagnosis.detail


def test_the_gradient_of_the_step_before() -> None:
    def stale(trace: Trace) -> None:
        old = trace.gradients[0]
        gradients(trace, 1, lambda n, g: old[n])

    def kept(trace: Trace) -> None:
        old = trace.gradients[0]
        gradients(trace, 1, lambda n, g: g + old[n])

    found(stale, Fault.STALE_GRADIENT, 1)
    found(kept, Fault.NOT_CLEARED, 1)


def test_the_gradient_at_the_parameters_of_the_step_before() -> None:
    found(lambda t: gradients(t, 2, lambda n, g: truth(t, 2, slice(0, 8), 1)[n]), Fault.STALE_WEIGHTS, 2)


@pytest.mark.slow
def test_one_element_that_was_not_reduced() -> None:
    """Its place is given, and nothing is fitted to it: two weights would explain any number."""

    def keep(trace: Trace, value: float | None = None) -> None:
        own = trace.gradients[1][WEIGHT].copy()
        own[3, 5] = truth(trace, 1, slice(4, 8))[WEIGHT][3, 5] if value is None else value
        gradients(trace, 1, lambda n, g: own if n == WEIGHT else g)

    drift = Drift(quantity=Quantity.parse(f"gradients/{WEIGHT}"), step=1, ranks=[1])
    diagnosis = found(keep, Fault.NOT_REDUCED, 1, drift)
    assert diagnosis.detail.startswith("in element [3, 5] of ")
    assert "the part of data-parallel rank 1" in diagnosis.detail
    assert "without the part of data-parallel rank 0" in found(keep, Fault.MISSING, 1).detail, "both ranks hold it"
    unknown = found(lambda t: keep(t, 0.123), Fault.BACKWARD, 1)
    assert "1 of 37 gradients wrong, all in blocks.0, in element [3, 5] of " in unknown.detail, unknown.detail


def test_the_tail_of_a_buffer_that_is_a_step_old() -> None:
    def doctor(trace: Trace) -> None:
        old = trace.gradients[0]

        def tail(name: str, gradient: np.ndarray) -> np.ndarray:
            count = gradient.size // 4
            return np.concatenate([gradient.ravel()[:-count], old[name].ravel()[-count:]]).reshape(gradient.shape)

        gradients(trace, 1, tail)

    diagnosis = found(doctor, Fault.STALE_GRADIENT, 1)
    assert "25% of each alone: the gradient of step 0" in diagnosis.detail, diagnosis.detail


def test_gradients_that_are_the_maximum_over_ranks() -> None:
    def doctor(trace: Trace) -> None:
        parts = [truth(trace, 1, slice(0, 4)), truth(trace, 1, slice(4, 8))]
        gradients(trace, 1, lambda n, g: np.maximum(parts[0][n], parts[1][n]))

    assert "times the maximum of the ranks' parts" in found(doctor, Fault.OTHER_REDUCTION, 1).detail


@pytest.mark.slow
def test_one_rank_with_old_weights_and_one_with_one_old_block() -> None:
    def doctor(trace: Trace, block: str) -> None:
        rows, now, old = make_batch(CASE.workload, 1).rows(4, 8), trace.parameters[1], trace.parameters[0]
        mixed = {n: old[n] if n.startswith(block) else now[n] for n in now}
        stale = exact_gradients(CASE.workload, mixed, rows).gradients
        gradients(trace, 1, lambda n, g: truth(trace, 1, slice(0, 4))[n] + stale[n])

    whole = found(lambda t: doctor(t, ""), Fault.STALE_WEIGHTS, 1)
    assert "before step 0 on data-parallel rank 1" in whole.detail
    part = found(lambda t: doctor(t, "blocks.1."), Fault.STALE_WEIGHTS, 1)
    assert "the weights of blocks.1 before step 0 on data-parallel rank 1" in part.detail


@pytest.mark.slow
def test_one_old_weight_on_one_rank_and_one_gathered_in_the_wrong_order() -> None:
    """As a rank that missed one broadcast, and as shards put together in the order of another group."""

    def doctor(trace: Trace, value: np.ndarray, rows: tuple[slice, ...]) -> None:
        mixed = {**trace.parameters[1], WEIGHT: value}
        parts = [
            exact_gradients(CASE.workload, mixed, make_batch(CASE.workload, 1).rows(r.start, r.stop)) for r in rows
        ]
        right = truth(trace, 1, slice(0, 4)) if len(rows) == 1 else dict.fromkeys(mixed, 0.0)
        gradients(trace, 1, lambda n, g: right[n] + sum(part.gradients[n] for part in parts))

    one, both = (slice(4, 8),), (slice(0, 4), slice(4, 8))
    old = found(lambda t: doctor(t, t.parameters[0][WEIGHT], one), Fault.STALE_WEIGHTS, 1)
    assert old.detail == f"the gradient with {WEIGHT} of before step 0 on data-parallel rank 1"

    def swapped(trace: Trace) -> None:
        doctor(trace, np.concatenate(np.split(trace.parameters[1][WEIGHT], 2)[::-1]), both)

    sharded = dataclasses.replace(CASE, layout=Layout(dp=2, num_micro_batches=2, zero_stage=3))
    moved = examine(swapped, case=sharded)
    assert moved is not None
    assert moved.fault is Fault.MISPLACED, moved.text
    assert moved.detail == f"the gradient with the 2 ranks' rows of {WEIGHT} in the reversed order"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_one_ranks_old_shard_in_one_pass(which: str) -> None:
    """As FSDP gathers it for that pass; the other pass gathers it anew."""

    def doctor(trace: Trace) -> None:
        now, value = trace.parameters[1], trace.parameters[1][WEIGHT].copy()
        value[len(value) // 2 :] = trace.parameters[0][WEIGHT][len(value) // 2 :]
        first, then = (now | {WEIGHT: value}, now) if which == "forward" else (now, now | {WEIGHT: value})
        stale = exact_gradients(CASE.workload, first, make_batch(CASE.workload, 1), changed=then)
        gradients(trace, 1, lambda n, g: stale.gradients[n])
        trace.losses[1] = stale.loss

    sharded = dataclasses.replace(CASE, layout=Layout(dp=2, num_micro_batches=2, zero_stage=3))
    diagnosis = examine(doctor, case=sharded)
    assert diagnosis and diagnosis.fault is Fault.STALE_WEIGHTS, diagnosis
    told = f"the gradient with rank 1's shards of {WEIGHT} of before step 0, in the {which} pass alone"
    assert diagnosis.detail == told


@pytest.mark.slow
def test_a_small_error_of_one_ranks_data_is_not_rounding() -> None:
    """Rounding would touch the embeddings of all ranks' tokens alike."""

    def doctor(trace: Trace) -> None:
        part = truth(trace, 1, slice(4, 8))
        random = np.random.default_rng(0)
        gradients(trace, 1, lambda n, g: g + 1e-3 * part[n] * random.standard_normal(g.shape))

    assert "rows that one rank's data touches are right except on data-parallel ranks [1]" in (
        found(doctor, Fault.BACKWARD, 1).detail
    )


@pytest.mark.slow
def test_partial_sums_of_tensor_parallel_ranks_are_named() -> None:
    norm = "blocks.1.feed_forward_norm.weight"
    trace, tolerance_model = copy.deepcopy(honest()[0]), honest()[1]
    whole = trace.gradients[1][norm].copy()
    random = (whole * np.random.default_rng(0).standard_normal(whole.shape)).astype(np.float32)
    trace.gradients[1][norm], trace.drifted = random, {1: {norm: whole - random}}
    case = dataclasses.replace(CASE, layout=Layout(tp=2))
    drift = Drift(quantity=Quantity.parse(f"gradients/{norm}"), step=1, ranks=[1])
    diagnosis = diagnose(case, trace, assess(trace, case.workload), [drift], tolerance_model)
    assert diagnosis
    assert diagnosis.fault is Fault.NOT_REDUCED
    assert f"their gradients of {norm} add up to the truth" in diagnosis.detail


@pytest.mark.parametrize(
    "change, detail",
    [
        (lambda value: np.concatenate(np.split(value, 2)[::-1]), "its 2 parts by rows are in the order 1, 0"),
        (lambda value: np.concatenate(np.split(value, 2, 1)[::-1], 1), "its 2 parts by columns are in the order 1, 0"),
        (lambda value: np.concatenate(np.split(value, 3)[::-1]), "its 3 parts by rows are in the order 2, 1, 0"),
        (lambda value: value[::-1], "its values are the right ones, in other places"),
    ],
)
def test_values_in_other_places(change: Callable[[np.ndarray], np.ndarray], detail: str) -> None:
    def doctor(trace: Trace) -> None:
        trace.parameters[2][WEIGHT] = change(trace.parameters[2][WEIGHT]).copy()

    assert detail in found(doctor, Fault.MISPLACED, 1).detail


def test_rows_that_a_sparse_optimizer_leaves_out() -> None:
    name = "embedding.tokens.weight"

    def doctor(trace: Trace) -> None:
        unused = ~trace.gradients[1][name].any(axis=1)
        trace.parameters[2][name][unused] = trace.parameters[1][name][unused]

    assert "those whose gradient is zero; the others are right" in found(doctor, Fault.NEVER_UPDATED, 1).detail


def test_the_batch_of_another_step() -> None:
    def other(trace: Trace) -> None:
        there = exact_gradients(CASE.workload, trace.parameters[1], make_batch(CASE.workload, 2)).gradients
        gradients(trace, 1, lambda n, g: there[n])

    assert "batch of step 2" in found(other, Fault.OTHER_BATCH, 1).detail


APART = "inputs and targets do not belong together: "


@pytest.mark.parametrize(
    "step, inputs, targets, fault, detail",
    [
        (
            1,
            [],
            [2, 3, 2, 3],
            Fault.MISPLACED,
            "of the next micro-batch, on data-parallel rank 0 in micro-batch 0",
        ),
        (1, [2, 3, 0, 1], [], Fault.MISPLACED, f"{APART}the targets are those of the next micro-batch"),
        (
            1,
            [4, 5],
            [],
            Fault.MISPLACED,
            "the inputs are those of the other data-parallel rank, on",
        ),
        (
            1,
            [],
            [1, 0, 3, 2],
            Fault.MISPLACED,
            "targets are those of the next row, on data-parallel rank 0",
        ),
        (0, [0, 1], [0, 1], Fault.OTHER_BATCH, "the batch of step 0, on data-parallel rank 0 in micro-batch 0"),
        (
            0,
            [0, 1],
            [],
            Fault.OTHER_BATCH,
            "inputs of step 0 with the targets of this one, on",
        ),
        (
            2,
            [],
            [0, 1],
            Fault.OTHER_BATCH,
            "targets of step 2 with the inputs of this one, on",
        ),
    ],
)
def test_inputs_and_targets_of_another_place(
    step: int, inputs: list[int], targets: list[int], fault: Fault, detail: str
) -> None:
    """The first rows of step 1 have the inputs and targets of these rows of `step`."""

    def doctor(trace: Trace) -> None:
        batch, other = make_batch(CASE.workload, 1), make_batch(CASE.workload, step)
        for own, there, rows in (
            (batch.inputs, other.inputs, inputs),
            (batch.targets, other.targets, targets),
            (batch.weights, other.weights, targets),
        ):
            own[: len(rows)] = there[rows].clone()
        wrong = exact_gradients(CASE.workload, trace.parameters[1], batch)
        gradients(trace, 1, lambda n, g: wrong.gradients[n])
        trace.losses[1] = wrong.loss

    assert detail in found(doctor, fault, 1).detail


@pytest.mark.parametrize(
    "places, region",
    [
        ([(3, 5)], "element [3, 5] of 64 x 32"),
        ([(3, 5), (40, 7)], "elements [3, 5], [40, 7] of 64 x 32"),
        ([(row, column) for row in range(0, 64, 5) for column in range(0, 32, 7)], "65 of 2,048 elements"),
        ([(row, column) for row in (3, 9) for column in range(32)], "2 of 64 rows (3, 9)"),
        ([(row, column) for row in range(64) for column in (3, 9)], "2 of 32 columns (3, 9)"),
    ],
)
def test_the_region_of_a_few_wrong_elements(places: list[tuple[int, int]], region: str) -> None:
    mask = np.zeros((64, 32), dtype=bool)
    mask[tuple(zip(*places, strict=True))] = True
    assert describe_region({WEIGHT: mask}) == f"in {region}"


@pytest.mark.slow
def test_gradients_in_bf16() -> None:
    def rounded(name: str, gradient: np.ndarray) -> np.ndarray:
        return torch.from_numpy(gradient).bfloat16().float().numpy()

    assert "bf16" in found(lambda t: gradients(t, 1, rounded), Fault.PRECISION, 1).detail


@pytest.mark.slow
def test_a_gradient_of_zeros_and_one_that_nothing_explains() -> None:
    rng = np.random.default_rng(0)
    missing = found(lambda t: gradients(t, 1, lambda n, g: g * (n != WEIGHT)), Fault.MISSING, 1)
    assert missing.detail == "1 of 1 wrong gradient is absent or all zero"
    found(lambda t: gradients(t, 1, lambda n, g: g * rng.normal(size=g.shape)), Fault.BACKWARD, 1)


@pytest.mark.slow
def test_parameters_that_stay_and_parameters_that_follow_another_rule() -> None:
    def still(trace: Trace) -> None:
        trace.parameters[2] = trace.parameters[1]

    def other(**changes: object) -> Callable[[Trace], None]:
        def doctor(trace: Trace) -> None:
            optimizer = ExactOptimizer(dataclasses.replace(CASE.workload.optimizer, **changes))  # type: ignore[arg-type]
            for step in range(STEPS - 1):
                after = optimizer.step(trace.parameters[step], trace.gradients[step])
            trace.parameters[2] = {n: p.astype(np.float32) for n, p in after.items()}

        return doctor

    assert OptimizerSpec().weight_decay
    found(still, Fault.NEVER_UPDATED, 1)
    assert found(other(weight_decay=0.0), Fault.UPDATE, 1).detail == "without weight decay"
    assert "betas (0.9, 0.999)" in found(other(betas=(0.9, 0.999)), Fault.UPDATE, 1).detail
    assert "2 = dp" in found(other(learning_rate=2e-3), Fault.UPDATE, 1).detail
    assert "multiples of it: 1" in found(other(weight_decay=0.2), Fault.UPDATE, 1).detail
    assert found(other(clip_norm=1.0), Fault.CLIPPING, 1).detail == "clipped to 1"


def restored(trace: Trace, change: Callable[[ExactOptimizer], None]) -> None:
    """Make the second step that of an optimizer whose states were changed after the first, as by a checkpoint."""
    optimizer = ExactOptimizer(CASE.workload.optimizer)
    for step in range(STEPS - 1):
        after = optimizer.step(trace.parameters[step], trace.gradients[step])
        if step == 0:
            change(optimizer)
    trace.parameters[2] = {n: p.astype(np.float32) for n, p in after.items()}


def test_an_optimizer_that_a_checkpoint_did_not_bring_back() -> None:
    def forgetful(trace: Trace) -> None:
        def forget(optimizer: ExactOptimizer) -> None:
            assert optimizer.optimizer is not None
            for state in optimizer.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

        restored(trace, forget)

    def exchanging(trace: Trace) -> None:
        def exchange(optimizer: ExactOptimizer) -> None:
            assert optimizer.optimizer is not None
            one, other = (optimizer.optimizer.state[optimizer.parameters[name]] for name in pair)
            for moment in ("exp_avg", "exp_avg_sq"):
                one[moment], other[moment] = other[moment], one[moment]

        restored(trace, exchange)

    pair = ("blocks.0.attention.q.weight", "blocks.0.attention.k.weight")

    def start(trace: Trace) -> None:
        trace.parameters[2] = trace.parameters[0]

    told = found(exchanging, Fault.MISPLACED, 1).detail
    assert told.startswith("with the moments of ") and all(name in told for name in pair)
    assert found(forgetful, Fault.UPDATE, 1).detail == "moments forgotten before this step"
    assert "back at their initial values" in found(start, Fault.UPDATE, 1).detail


def test_moments_of_another_rank_s_part_of_a_flat_buffer_are_named() -> None:
    """As where every rank reads the first rank's file of moments."""

    def of_first(trace: Trace) -> None:
        def take(optimizer: ExactOptimizer) -> None:
            assert optimizer.optimizer is not None
            states = [optimizer.optimizer.state[p] for p in optimizer.parameters.values()]
            for moment in ("exp_avg", "exp_avg_sq"):
                flat = torch.cat([state[moment].flatten() for state in states])
                half = -(-len(flat) // 2)
                flat[half:] = flat[: len(flat) - half].clone()
                for state, part in zip(states, torch.split(flat, [s[moment].numel() for s in states]), strict=True):
                    state[moment].copy_(part.view_as(state[moment]))

        restored(trace, take)

    case = dataclasses.replace(CASE, layout=dataclasses.replace(CASE.layout, zero_stage=1))
    diagnosis = examine(of_first, case=case)
    assert diagnosis and diagnosis.fault is Fault.MISPLACED and diagnosis.step == 1, diagnosis
    assert diagnosis.detail.startswith("with the moments of rank 0's part of a flat buffer in that of rank 1")


def test_what_is_told_wrong_while_all_that_is_trained_is_right() -> None:
    def loss(trace: Trace) -> None:
        trace.losses[1] *= 2

    def norm(trace: Trace) -> None:
        trace.norms[1] = (trace.norms[1] or 0.0) / 2**0.5

    assert "2 = dp" in found(loss, Fault.LOSS, 1).detail
    assert "1/sqrt(dp)" in found(norm, Fault.CLIPPING, 1).detail


def test_another_start_comes_before_all_that_follows_from_it() -> None:
    def start(trace: Trace) -> None:
        trace.parameters[0] = {
            n: torch.from_numpy(p).bfloat16().float().numpy() for n, p in trace.parameters[0].items()
        }

    assert "bf16" in found(start, Fault.START, 0).detail


def test_replicas_that_drift_after_a_step_are_said_to_do_so_in_it() -> None:
    drift = Drift(quantity=Quantity.parse(f"parameters/{WEIGHT}"), step=2, ranks=[1])
    assert found(lambda trace: None, Fault.DRIFT, 1, drift).ranks == [1]


def test_a_factor_is_named_by_all_that_it_equals() -> None:
    assert (
        named_factor(0.50001, {"1/dp": 0.5, "1/pp": 0.5, "dp": 2.0})
        == "0.50001 = 1/dp = 1/pp (a layout in which these differ tells which)"
    )
    assert named_factor(0.7, {"1/dp": 0.5}) == "0.7"
    assert named_factor(1.00005, {"unmasked part of the rows": 1.0}) == "1.00005", "1 is right, and names no error"


def test_a_gradient_of_zero_where_there_is_none_is_not_called_clipping() -> None:
    """Every hypothesis that leaves one zero gradient alone fits; the one that says so must win."""
    trace = copy.deepcopy(honest()[0])
    trace.gradients[0][WEIGHT] = np.zeros_like(trace.gradients[0][WEIGHT])
    failed = FailedStep(case=CASE, trace=trace, step=0, tolerances={WEIGHT: 1e-6})
    trace.parameters[1] = replay(failed, ExactOptimizer(CASE.workload.optimizer))
    assert explain_updates(failed) == (Fault.UPDATE, "as if unused parameters had a gradient of zero")


def test_a_schedule_that_restarted_is_not_another_rate() -> None:
    """As after a resume that does not load the scheduler: the third step has the first one's rate."""
    spec = dataclasses.replace(CASE.workload.optimizer, warmup_steps=8)
    case = dataclasses.replace(CASE, workload=dataclasses.replace(CASE.workload, optimizer=spec))
    trace, right = copy.deepcopy(honest()[0]), ExactOptimizer(spec)
    for step in range(2):
        trace.parameters[step + 1] = dict(right.step(trace.parameters[step], trace.gradients[step]))
    right.steps = 0
    trace.parameters[3] = dict(right.step(trace.parameters[2], trace.gradients[2]))
    names = sorted(trace.parameters[0])
    failed = FailedStep(case=case, trace=trace, step=2, tolerances=dict.fromkeys(names, 1e-9))
    assert explain_updates(failed) == (Fault.UPDATE, "with a schedule that restarted")


def explained_update(run: Callable[[ExactOptimizer, int], None], layout: Layout, warmup_steps: int = 0) -> str:
    """Return the explanation of a run whose optimizer `run` changes before every step; empty if there is none."""
    spec = dataclasses.replace(CASE.workload.optimizer, warmup_steps=warmup_steps)
    case = dataclasses.replace(CASE, layout=layout, workload=dataclasses.replace(CASE.workload, optimizer=spec))
    trace, own, right = copy.deepcopy(honest()[0]), ExactOptimizer(spec), ExactOptimizer(spec)
    failed_step = None
    for step in range(STEPS):
        run(own, step)
        after = own.step(trace.parameters[step], trace.gradients[step])
        exact = right.step(trace.parameters[step], trace.gradients[step])
        trace.parameters[step + 1] = dict(after)
        if failed_step is None and any(np.linalg.norm(after[n] - exact[n]) > 1e-9 for n in exact):
            failed_step, wrong = step, [n for n in sorted(exact) if np.linalg.norm(after[n] - exact[n]) > 1e-9]
    assert failed_step is not None
    failed = FailedStep(case=case, trace=trace, step=failed_step, tolerances=dict.fromkeys(wrong, 1e-9))
    _, detail = explain_updates(failed) or (Fault.UNEXPLAINED, "")
    return detail


def test_a_schedule_stepped_once_a_micro_batch_is_not_one_that_is_a_step_ahead() -> None:
    """Both have the same rate in the second step, where the first error shows."""

    def twice(optimizer: ExactOptimizer, step: int) -> None:
        optimizer.steps = 2 * step

    def ahead(optimizer: ExactOptimizer, step: int) -> None:
        optimizer.steps = step + (step > 0)

    assert "goes on by 2" in explained_update(twice, CASE.layout, warmup_steps=8)
    assert explained_update(ahead, CASE.layout, warmup_steps=8) == "with the learning rate of the next step"


def test_a_count_of_steps_that_begins_again_is_not_another_rate() -> None:
    def restart(optimizer: ExactOptimizer, step: int) -> None:
        if step == 2:
            assert optimizer.optimizer is not None
            for state in optimizer.optimizer.state.values():
                state["step"].zero_()

    assert explained_update(restart, CASE.layout).startswith("bias correction begins again at this step")


def test_moments_that_one_shard_lost() -> None:
    """Only the second rank's rows: the first rank's are right."""

    def lose(optimizer: ExactOptimizer, step: int) -> None:
        if step == 1:
            assert optimizer.optimizer is not None
            for state in optimizer.optimizer.state.values():
                for moment in (state["exp_avg"], state["exp_avg_sq"]):
                    moment[-(-len(moment) // 2) :] = 0

    expected = "moments forgotten before this step, in the rows of data-parallel rank 1 alone"
    assert explained_update(lose, Layout(dp=2, zero_stage=3)) == expected
    of_replica = explained_update(lose, Layout(dp=2))  # replicas hold all rows
    assert of_replica.startswith("moments forgotten before this step, in ") and "rank" not in of_replica


def test_one_shard_that_is_clipped_by_its_own_norm() -> None:
    class Clips(ExactOptimizer):
        def clip(self, max_norm: float) -> None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values()])
            own = [p.grad[-(-len(p) // 2) :] for p in self.parameters.values()]
            local = torch.nn.utils.get_total_norm(own)
            for parameter, part in zip(self.parameters.values(), own, strict=True):
                part.mul_(norm / local)
                parameter.grad.mul_(max_norm / norm)

    def clip(optimizer: ExactOptimizer, step: int) -> None:
        optimizer.__class__ = Clips

    found = explained_update(clip, Layout(dp=2, zero_stage=3))
    assert found == "clipped by the norm of a rank's own rows, not of all, in the rows of data-parallel rank 1 alone"


def test_waiting_for_a_busy_machine_does_not_count_as_search() -> None:
    stopwatch = Stopwatch()
    time.sleep(0.2)
    assert stopwatch.seconds < 0.2


@pytest.mark.slow
def test_a_search_for_an_altered_weight_is_left_out_where_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = FailedStep(case=CASE, trace=copy.deepcopy(honest()[0]), step=1, tolerances={WEIGHT: 1e-9})
    assert failed.affords(3)
    monkeypatch.setattr("meshmark.judge.failed_step._SEARCH_SECONDS", 1e-9)
    assert not failed.affords(3)

    def doctor(trace: Trace) -> None:
        mixed = trace.parameters[1] | {WEIGHT: trace.parameters[0][WEIGHT]}
        stale = exact_gradients(CASE.workload, mixed, make_batch(CASE.workload, 1)).gradients
        gradients(trace, 1, lambda n, g: stale[n])

    assert "rounding" in found(doctor, Fault.PRECISION, 1).detail, "which is how it looks"
    monkeypatch.setattr("meshmark.judge.failed_step._SEARCH_SECONDS", 1e9)
    assert f"the gradient with {WEIGHT} of before step 0" in found(doctor, Fault.STALE_WEIGHTS, 1).detail


@pytest.mark.parametrize(
    "weights, by_chance",
    [
        ([-0.3533, -1.268, 3.043, 0.01132, 1.944, 0.2843, 1.422, -0.4099], True),  # of a bias of 16 elements in bf16
        ([1.0, 1.0, 0.0, 0.0], False),
        ([-1.0, 1.0, 1.0, 1.0], False),  # a part that is subtracted
        ([0.9, 1.3, 1.7, 0.2], False),  # means of unequal numbers of tokens
        ([-1.0, -1.0], False),
    ],
)
def test_fitted_weights_of_no_meaning_are_no_cause(weights: list[float], by_chance: bool) -> None:
    assert _is_by_chance(np.array(weights)) is by_chance


def test_moments_are_exchanged_among_parameters_with_the_same_states() -> None:
    """Muon steps matrices of blocks; a square table of positions has AdamW's moments."""
    spec = OptimizerSpec(kind=OptimizerKind.MUON, momentum=0.95, nesterov=True, clip_norm=None)
    names = ("positions.weight", "blocks.0.weight", "blocks.1.weight")
    rng = np.random.default_rng(0)
    parameters = {name: rng.standard_normal((4, 4)) for name in names}
    exchanged, plain = _TakesMoments(spec, 1, ("momentum_buffer",), 1), ExactOptimizer(spec)
    for _ in range(2):
        gradients = {name: rng.standard_normal((4, 4)) for name in names}
        ours, theirs = exchanged.step(parameters, gradients), plain.step(parameters, gradients)
    assert np.array_equal(ours["positions.weight"], theirs["positions.weight"])
    assert not np.allclose(ours["blocks.0.weight"], theirs["blocks.0.weight"])


@pytest.mark.parametrize("kept", [True, False])
def test_replicas_that_kept_the_values_of_the_step_before_are_told(kept: bool) -> None:
    """A broadcast that was lost, or an update that one rank did not make."""
    steps = [{"a": "0", "b": "0"}, {"a": "1", "b": "1"}, {"a": "2", "b": "2"}]
    theirs = [*steps[:2], {"a": "2", "b": "1" if kept else "3"}]
    drifts = drifts_between(QuantityKind.PARAMETERS, {0: steps, 1: theirs})
    assert [(d.quantity.name, d.step, d.ranks, d.unchanged) for d in drifts] == [("b", 2, [1], kept)]
    found = first_drift(drifts)
    assert found and found.step == 1 and found.detail.endswith(": they are those of the step before") is kept


def evaluated(case: Case, rows: Callable[[Batch], Batch]) -> Trace:
    """Return a right run's trace whose evaluations are of other rows."""
    trace = dataclasses.replace(honest()[0])
    trace.evaluations = [
        exact_loss(case.workload, trace.parameters[step], rows(make_batch(case.workload, step)))
        for step in range(STEPS)
    ]
    return trace


@pytest.mark.parametrize(
    "rows, told",
    [
        (
            lambda batch: batch.take(torch.tensor([0, 1, 2, 3, 4, 5, 6, 0])),
            "row 0 (row 0 of data-parallel rank 0) is in ",
        ),
        (
            lambda batch: batch.take(torch.tensor([0, 1, 2, 4, 5, 6, 7])),
            "row 3 (row 3 of data-parallel rank 0) is left",
        ),
        (
            lambda batch: batch.take(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 5])),
            "row 5 (row 1 of data-parallel rank 1) co",
        ),
        (
            lambda batch: batch.take(torch.tensor([0, 1, 2, 4, 5, 6])),
            "the last row of every data-parallel rank is left out",
        ),
    ],
    ids=["another row", "no row", "a row twice", "no last rows"],
)
def test_a_wrong_evaluation_is_explained_by_its_rows(rows: Callable[[Batch], Batch], told: str) -> None:
    """It was said to be of another function."""
    found = explain_evaluation(CASE, evaluated(CASE, rows), 1.01, {})
    assert found[0] is Fault.EVALUATION and found[1].startswith(told)


def test_an_evaluation_of_older_weights_or_of_one_rank_is_named() -> None:
    trace = evaluated(CASE, lambda batch: batch)
    older = dataclasses.replace(trace, evaluations=[trace.evaluations[0], *trace.evaluations[:-1]])
    batches = [make_batch(CASE.workload, step) for step in range(STEPS)]
    older.evaluations = [
        exact_loss(CASE.workload, trace.parameters[max(step - 1, 0)], batch) for step, batch in enumerate(batches)
    ]
    assert explain_evaluation(CASE, older, 1.01, {})[1] == "it is that of the weights before the last update"
    alone = evaluated(CASE, lambda batch: batch)
    alone.evaluations = [
        2 * exact_loss(CASE.workload, trace.parameters[step], batch.shard(1, 2)) for step, batch in enumerate(batches)
    ]
    assert explain_evaluation(CASE, alone, 1.01, {})[1] == "it is that of the rows of data-parallel rank 1 alone"
    doubled = evaluated(CASE, lambda batch: batch)
    doubled.evaluations = [2 * loss for loss in doubled.evaluations]
    assert explain_evaluation(CASE, doubled, 2.0, {"dp": 2.0})[1] == "it is 2 = dp times the truth"


def test_a_norm_without_what_other_ranks_hold_is_named() -> None:
    rng = np.random.default_rng(1)
    names = [f"blocks.0.feed_forward.experts.{number}.up.weight" for number in range(4)]
    gradients = {name: rng.standard_normal((4, 4)) for name in ("embedding.tokens.weight", *names, "head.norm.weight")}
    own = {name: x for name, x in gradients.items() if name not in names[2:]}
    told = _counted_otherwise(global_norm(own), gradients, CASE)
    assert told == "the reported norm leaves out the experts that rank 0 of 2 does not hold"
    deep = dataclasses.replace(CASE.workload, model=dataclasses.replace(CASE.workload.transformer, num_layers=3))
    uneven = dataclasses.replace(CASE, workload=deep, layout=Layout(pp=2, num_micro_batches=4))
    layers = {f"blocks.{i}.up.weight": rng.standard_normal((4, 4)) for i in range(3)}
    whole = {
        "embedding.tokens.weight": rng.standard_normal((4, 4)),
        **layers,
        "head.norm.weight": rng.standard_normal(4),
    }
    last = {name: x for name, x in whole.items() if name.startswith(("blocks.2", "head"))}
    assert (
        _counted_otherwise(global_norm(last), whole, uneven)
        == "the reported norm leaves out what pipeline rank 1 does not hold"
    )


def test_shares_of_gradients_that_are_clipped_on_the_way() -> None:
    parts = [{"x": np.array([3.0, 0.0])}, {"x": np.array([0.0, 4.0])}]
    assert _clipped_shares(parts, 1.0, is_running=False) == pytest.approx([1 / 3, 1 / 4])
    left = 1 / math.hypot(1, 4)
    assert _clipped_shares(parts, 1.0, is_running=True) == pytest.approx([left / 3, left])
    assert _clipped_shares(parts, 10.0, is_running=True) == [1.0, 1.0]


def test_another_mask_in_one_part_of_a_sequence() -> None:
    """PyTorch aligns a causal mask with the first key, where a rank has fewer queries than keys."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    attend, right = F.scaled_dot_product_attention, F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for name, part in (
        ("a causal mask that counts queries from the first key", attend(q[..., 4:, :], k, v, is_causal=True)),
        ("keys of its own part alone", attend(*(x[..., 4:, :] for x in (q, k, v)), is_causal=True)),
        ("keys of later tokens too", attend(q[..., 4:, :], k, v)),
    ):
        found = _causal_in_part(1, 2, _SEEN_BY_PART[name])(attend, q, k, v, is_causal=True)
        torch.testing.assert_close(found[..., :4, :], right[..., :4, :])
        torch.testing.assert_close(found[..., 4:, :], part)


def test_gradients_divided_by_the_next_loss_scale_are_named_and_not_by_the_layout() -> None:
    def doctor(trace: Trace) -> None:
        trace.loss_scales = [4.0, 4.0, *[8.0] * (STEPS - 2)]
        gradients(trace, 1, lambda name, gradient: gradient / 2)

    told = found(doctor, Fault.SCALED, 1).detail
    assert told.startswith("0.5 times the truth, and 1 times in the next steps") and "dp" not in told, told
    assert told.endswith("the loss was multiplied by 4, and gradients divided by 8, the next step's"), told


def test_clipping_of_gradients_that_the_loss_scale_multiplies_is_named() -> None:
    def doctor(trace: Trace) -> None:
        trace.loss_scales = [2.0**12] * STEPS
        unclipped = ExactOptimizer(dataclasses.replace(CASE.workload.optimizer, clip_norm=None))
        limit = CASE.workload.optimizer.clip_norm or 1.0
        for step in range(2):
            own = trace.gradients[step]
            factor = min(1.0, limit / (2.0**12 * global_norm(own)))
            after = unclipped.step(trace.parameters[step], {n: factor * g.astype(np.float64) for n, g in own.items()})
            trace.parameters[step + 1] = {n: p.astype(np.float32) for n, p in after.items()}

    assert found(doctor, Fault.CLIPPING, 0).detail == (
        "clipped by the norm of gradients that the loss scale still multiplies"
    )


def test_elements_that_stay_are_named_where_they_are_one_ranks_rows() -> None:
    """It was said that one rank's rows follow another rule."""

    def doctor(trace: Trace) -> None:
        after = trace.parameters[2][WEIGHT] = trace.parameters[2][WEIGHT].copy()
        half = len(after) // 2
        after[half:] = trace.parameters[1][WEIGHT][half:]

    diagnosis = found(doctor, Fault.NEVER_UPDATED, 1)
    assert diagnosis.detail.startswith("no move in the last"), diagnosis.detail


def test_one_trust_ratio_for_parts_of_a_flat_buffer() -> None:
    rng = np.random.default_rng(0)
    before = {"a": rng.standard_normal((3, 2)), "b": rng.standard_normal(5)}
    own = {name: rng.standard_normal(x.shape) for name, x in before.items()}
    spec = OptimizerSpec(kind=OptimizerKind.LAMB, clip_norm=None)
    flat = [{"0": x[:6], "1": x[6:]} for x in (np.concatenate([t["a"].ravel(), t["b"]]) for t in (before, own))]
    right = ExactOptimizer(spec).step(*flat)
    told = {
        each.detail: each.optimizer.step(before, own)
        for each in update_hypotheses(spec, 0, shards=2)
        if "trust ratio for each rank's part" in each.detail
    }
    [(_, after)] = told.items()
    assert np.allclose(np.concatenate([after["a"].ravel(), after["b"]]), np.concatenate([right["0"], right["1"]]))


def test_attention_whose_keys_get_gradients_of_their_own_part_alone() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    apart = _apart_in_backward(2)(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    assert torch.allclose(right, apart)
    (of_own,) = torch.autograd.grad(right[..., :2, :].sum(), v)
    (of_first,) = torch.autograd.grad(apart.sum(), v)
    assert torch.allclose(of_own[..., :2, :], of_first[..., :2, :]), "later queries do not reach them"
