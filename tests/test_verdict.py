"""Pass and fail at the edges of every verdict, by records made by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from meshmark.judge.deviation import Deviation, Drift, Quantity, QuantityKind
from meshmark.judge.faults import Diagnosis, Fault
from meshmark.measure.readings import Bytes
from meshmark.records.record import Record, Verdict
from meshmark.run.verdict import (
    BLIND,
    BLIND_UNROUNDED,
    HIDDEN,
    LEAK_BYTES,
    SCALARS_BYTES,
    Limit,
    MemoryTotal,
    _like,
    detection_limits,
    judge_communication,
    judge_equivalence,
    judge_memory,
)
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory, ModelStates
from tests.factories import (
    make_case,
    make_equivalence,
    make_good,
    make_memory,
    make_memory_evidence,
    make_traffic_evidence,
)

LOSS, GRADIENT, OTHER = map(Quantity.parse, ("loss", "gradients/a.weight", "parameters/b.weight"))
FACTOR = 4.0
FACTORS = dict.fromkeys(("gradients", "parameters", "number"), FACTOR)
FINE = Deviation(distance=1.0, scale=1e6, factor=1.0)


def run(distance: float, noise: float = 1.0, quantity: Quantity = GRADIENT, **changes: object) -> Record:
    """Three quantities over two steps, all at their noise but one at one step."""
    odd = Deviation(distance=distance, scale=1e6, factor=1.25)
    deviations = {name: [FINE, FINE] for name in (LOSS, GRADIENT, OTHER)}
    noises = {name: [1.0, 1.0] for name in deviations}
    deviations[quantity] = [FINE, odd]
    noises[quantity] = [1.0, noise]
    deviations[Quantity.parse("initial/a.weight")] = [Deviation(distance=0.0, scale=1.0, factor=1.0)]
    found = make_equivalence(**{"deviations": deviations, "noise": noises, "factors": FACTORS, **changes})
    return make_good(equivalence=found)


@pytest.mark.parametrize("quantity", [LOSS, GRADIENT, OTHER])
@pytest.mark.parametrize("excess, passed", [(0.0, True), (-1e-9, True), (1e-9, False), (0.5, False), (1e9, False)])
def test_every_quantity_passes_up_to_the_factor_times_its_noise(
    quantity: Quantity, excess: float, passed: bool
) -> None:
    verdict = judge_equivalence(run(FACTOR + excess, quantity=quantity))
    assert (verdict.suite, verdict.passed) == ("equivalence", passed)


def test_the_worst_quantity_is_the_evidence() -> None:
    verdict = judge_equivalence(run(30.0, noise=2.0))
    assert not verdict.passed
    assert verdict.summary == f"{GRADIENT} at step 1 is 15 x its noise, 1.25 x the truth"
    expected = {
        "worst_quantity": str(GRADIENT),
        "worst_step": 1,
        "ratio": 15.0,
        "distance": 30.0,
        "truth_norm": 1e6,
        "multiple_of_truth": 1.25,
        "noise": 2.0,
        "factor": FACTOR,
        "failing": 1,
        "compared": 6,
    }
    assert expected.items() <= verdict.evidence.items()


@pytest.mark.parametrize("distance", [math.inf, math.nan])
def test_what_is_missing_or_no_number_fails(distance: float) -> None:
    """NaN is what infinity becomes on disk: a record can be judged again."""
    verdict = judge_equivalence(run(distance))
    assert not verdict.passed
    assert verdict.evidence["worst_quantity"] == str(GRADIENT)


@pytest.mark.parametrize("quantity", [LOSS, GRADIENT, OTHER])
@pytest.mark.parametrize("noise", [math.nan, math.inf])
def test_a_tolerance_model_that_is_no_number_decides_nothing(noise: float, quantity: Quantity) -> None:
    """When `single` itself overflows (fp16 does), its noise is infinite, on disk NaN; what else is wrong stays so."""
    verdict = judge_equivalence(run(1e5, noise=noise, quantity=quantity))
    assert verdict.undecided and not verdict.passed
    assert verdict.summary.startswith("cannot tell")
    record = run(1e5, noise=noise, quantity=quantity)
    sound = next(q for q in (LOSS, GRADIENT, OTHER) if q != quantity)
    record.equivalence.deviations[sound] = [FINE, dataclasses.replace(FINE, distance=2 * FACTOR)]
    wrong = judge_equivalence(record)
    assert (wrong.passed, wrong.undecided) == (False, False)
    assert wrong.evidence["worst_quantity"] == str(sound)


@pytest.mark.parametrize(
    "moved, seen", [([1.0, 1.0], True), ([1e-9, 1.0], True), ([1e-9, 1e-9], False), ([0, 0], False)]
)
def test_steps_that_are_small_beside_rounding_decide_nothing(moved: list[float], seen: bool) -> None:
    """A step that is not made, or goes the other way, would pass."""
    record = run(1.0, moved=moved)
    for quantity in (q for q in record.equivalence.deviations if q.kind is QuantityKind.PARAMETERS):
        record.equivalence.deviations[quantity] = [Deviation(distance=1e-9, scale=1e3, factor=1.0)] * 2
        record.equivalence.noise[quantity] = [1e-9, 1e-9]  # type: ignore[index]
    verdict = judge_equivalence(record)
    assert (verdict.passed, verdict.undecided) == (seen, not seen)
    assert seen or verdict.summary.startswith("cannot tell: steps of the optimizer are small beside the rounding")


@pytest.mark.parametrize("precision, most", [(Precision.BF16, BLIND), (Precision.FP32, BLIND_UNROUNDED)])
@pytest.mark.parametrize("share, seen", [(1.0, True), (1.01, False), (1e20, False)])
def test_noise_that_hides_too_much_decides_nothing(precision: Precision, most: float, share: float, seen: bool) -> None:
    """Such as that of a damaged cache, which made a gradient that was wrong by a tenth into one that was right."""
    noise, case = share * most / FACTOR, make_case(precision=precision)

    def judged(distance: float) -> Verdict:
        return judge_equivalence(dataclasses.replace(run(distance, noise=1e6 * noise), case=case))

    verdict = judged(most / 3 * 1e6)
    assert (verdict.passed, verdict.undecided) == (seen, not seen)
    if not seen:
        assert verdict.summary.startswith("cannot tell: a scaling of the gradient of a.weight by less than")
        assert f"{most:g} is the most" in verdict.summary
    wrong = judged(1e9 * noise)
    assert (wrong.passed, wrong.undecided) == (False, False)


def test_a_gradient_that_a_step_does_not_use_hides_nothing_there() -> None:
    record = run(1.0)
    unused = Deviation(distance=0.0, scale=0.0, factor=0.0)
    used = Deviation(distance=0.0, scale=100.0, factor=1.0)
    record.equivalence.deviations[Quantity.parse("gradients/c.weight")] = [used, unused]
    record.equivalence.noise[Quantity.parse("gradients/c.weight")] = [1e-3, 0.0]
    assert detection_limits(record)["c.weight"].any_direction == pytest.approx(FACTOR * 1e-5)
    assert judge_equivalence(record).passed


def test_without_noise_only_the_exact_value_passes() -> None:
    """Noise runs that happen to be exact are given half a unit in the last place where they are measured."""
    assert judge_equivalence(run(0.0, noise=0.0)).passed
    assert not judge_equivalence(run(1e-30, noise=0.0)).passed


@pytest.mark.parametrize("distance", [1e-30, math.inf, math.nan])
def test_one_bit_of_a_wrong_start_fails(distance: float) -> None:
    record = run(1.0)
    record.equivalence.deviations[Quantity.parse("initial/a.weight")] = [
        Deviation(distance=distance, scale=1.0, factor=1.0)
    ]
    verdict = judge_equivalence(record)
    assert not verdict.passed
    assert verdict.summary == "starts elsewhere: 1 initial values differ, first initial/a.weight"


def test_replicas_that_drift_apart_fail_with_where() -> None:
    drift = Drift(quantity=Quantity.parse("parameters/b.weight"), step=2, ranks=[1, 3])
    verdict = judge_equivalence(run(1.0, drifts=[drift]))
    assert not verdict.passed
    assert verdict.summary == "replicas differ: parameters/b.weight at step 2 on ranks [1, 3]"


def test_a_norm_that_single_does_not_tell_cannot_be_held_against_a_framework() -> None:
    """Without clipping `single` tells no norm, so there is no noise of it, while DeepSpeed tells one anyway. It is
    judged some way or left out; it must not break the run."""
    record = run(1.0)
    record.equivalence.deviations[Quantity.parse("norm")] = [FINE, FINE]
    assert judge_equivalence(record).passed


def test_each_kind_of_quantity_has_its_own_factor() -> None:
    record = run(5.0, factors=FACTORS | {"gradients": 6.0})
    assert judge_equivalence(record).passed
    assert not judge_equivalence(run(5.0, quantity=OTHER, factors=FACTORS | {"gradients": 6.0})).passed


def test_a_multiple_fails_where_the_distance_does_not_see_it() -> None:
    """The gradient stands at its noise, but 1.25 times too long, which rounding in all directions does not make it."""
    record = run(1.0)
    record.equivalence.noise[Quantity.parse("scale/a.weight")] = [1e-2, 1e-2]
    verdict = judge_equivalence(record)
    assert not verdict.passed
    assert verdict.evidence["worst_quantity"] == "scale/a.weight"
    assert verdict.evidence["distance"] == pytest.approx(0.25)


def test_the_detection_limit_is_the_worst_tolerance_over_all_steps() -> None:
    record = run(1.0)
    record.equivalence.deviations[Quantity.parse("gradients/c.weight")] = [
        Deviation(distance=0.0, scale=100.0, factor=1.0)
    ] * 2
    record.equivalence.noise[Quantity.parse("gradients/c.weight")] = [1e-3, 2e-3]
    limit = FACTOR * 2e-3 / 100
    assert detection_limits(record)["c.weight"] == Limit(scaling=limit, any_direction=limit)
    assert judge_equivalence(record).evidence["blindest"] == "c.weight"


def test_a_multiple_sees_a_scaling_before_the_distance_does() -> None:
    """Its noise may point the other way, so more than the tolerance is needed to be sure."""
    record = run(1.0)
    record.equivalence.deviations[Quantity.parse("gradients/c.weight")] = [
        Deviation(distance=0.0, scale=100.0, factor=1.0)
    ] * 2
    record.equivalence.noise.update(
        {Quantity.parse("gradients/c.weight"): [1e-3, 1e-3], Quantity.parse("scale/c.weight"): [1e-7, 2e-7]}
    )
    assert detection_limits(record)["c.weight"] == Limit(
        scaling=pytest.approx((FACTOR + HIDDEN) * 2e-7), any_direction=pytest.approx(FACTOR * 1e-5)
    )


def test_gradients_that_are_zero_by_mathematics_have_no_detection_limit() -> None:
    record = run(1.0)
    record.equivalence.deviations[Quantity.parse("gradients/attention.k.bias")] = [
        Deviation(distance=1e-9, scale=1e-12, factor=0.0)
    ] * 2
    record.equivalence.noise[Quantity.parse("gradients/attention.k.bias")] = [1e-9, 1e-9]
    assert detection_limits(record).keys() == {"a.weight"}
    assert judge_equivalence(record).passed


def test_a_run_whose_gradients_should_all_be_zero_has_no_detection_limit() -> None:
    """As of a model whose weights are all zero, which a broken set-up leaves."""
    record = run(1.0)
    record.equivalence.deviations[GRADIENT] = [Deviation(distance=1.0, scale=0.0, factor=0.0)] * 2
    assert detection_limits(record) == {}
    assert not judge_equivalence(record).passed


def test_the_diagnosis_is_part_of_the_evidence() -> None:
    found = Diagnosis(fault=Fault.SCALED, step=1, names=["a.weight"], num_names=3, ranks=[1], detail="0.5 = 1/dp")
    verdict = judge_equivalence(run(30.0, diagnosis=found))
    assert (
        verdict.evidence["diagnosis"] == "gradient scaled (from step 1 on, a.weight and 2 more, on rank 1): 0.5 = 1/dp"
    )


# Memory: planned are 400, 400 and 800 bytes on each of two ranks.


def memory(rank: int, category: str, measured: int, **changes: Any) -> Record:  # noqa: ANN401
    readings = [make_memory(), make_memory()]
    object.__setattr__(readings[rank].states, category, measured)
    return make_good(memory=make_memory_evidence(**{"readings": readings, "extra_memory": [[], []], **changes}))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("category, planned", [("parameters", 400), ("gradients", 400), ("optimizer_states", 800)])
@pytest.mark.parametrize("relative, passed", [(0.0, True), (0.01, True), (-0.01, True), (0.015, False), (-1.0, False)])
def test_states_pass_within_one_percent_on_every_rank(
    rank: int, category: str, planned: int, relative: float, passed: bool
) -> None:
    verdict = judge_memory(memory(rank, category, int(planned * (1 + relative))))
    assert verdict.passed == passed
    if relative:
        assert (verdict.evidence["category"], verdict.evidence["rank"]) == (category, rank)


def test_a_framework_that_does_not_shard_fails() -> None:
    record = memory(0, "optimizer_states", 800)
    record = make_good(
        memory=make_memory_evidence(
            readings=record.memory.readings,
            extra_memory=[[], []],
            planned=[ModelStates(parameters=400, gradients=400, optimizer_states=400)] * 2,
        )
    )
    verdict = judge_memory(record)
    assert not verdict.passed
    assert "optimizer_states" in verdict.summary and "800 bytes, planned 400 (100.00%)" in verdict.summary


def test_an_excess_is_named_by_what_is_as_large() -> None:
    case = make_case(layout=Layout(dp=2, zero_stage=3, num_micro_batches=2))
    block = 4 * case.workload.model.block_parameters
    kept = MemoryTotal(category="activations", rank=0, measured=1e6 + 2 * block, planned=1e6)
    assert _like(kept, [], case).endswith("the gathered weights of 2 blocks")
    assert not _like(kept, [], make_case(layout=Layout(dp=2, num_micro_batches=2))), "which gathers none"
    own = [MemoryTotal(category="gradients", rank=rank, measured=700.0 + rank, planned=700.0) for rank in (0, 1)]
    steady = MemoryTotal(category="steady", rank=1, measured=2401.0, planned=1700.0)
    assert _like(steady, own, case) == ", as much more as all gradients of the rank"


def test_a_declared_remainder_counts_on_its_rank_and_in_its_category_alone() -> None:
    declared = ExtraMemory(category="gradients", num_bytes=100.0, reason="padding to 8")
    good = judge_memory(memory(1, "gradients", 500, extra_memory=[[], [declared]]))
    assert good.passed
    assert good.evidence["declared"] == "padding to 8"
    assert not judge_memory(memory(1, "gradients", 500, extra_memory=[[declared], []])).passed
    assert not judge_memory(memory(1, "parameters", 500, extra_memory=[[], [declared]])).passed
    assert not judge_memory(memory(1, "gradients", 400, extra_memory=[[], [declared]])).passed, (
        "declared, but not there"
    )


def test_bytes_where_none_are_planned_fail() -> None:
    """SGD keeps no states; one stray scalar is allowed to no one."""
    plan = [ModelStates(parameters=400, gradients=400, optimizer_states=0)] * 2
    assert not judge_memory(memory(0, "optimizer_states", 8, planned=plan)).passed


def test_a_rank_without_a_reading_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="shorter|longer"):
        judge_memory(make_good(memory=make_memory_evidence(readings=[make_memory()])))


@pytest.mark.parametrize(
    "category, methods",
    [("gradients", ["`Engine.holdings`", "`Adapter.extra_memory`"]), ("activations", ["`Adapter.recipe`"])],
)
def test_bytes_that_differ_name_the_method_to_mend(category: str, methods: list[str]) -> None:
    record = memory(1, "gradients", 300)
    if category == "activations":
        held = [dataclasses.replace(make_memory(), held=Bytes(activations=500))] * 2
        plan = [ModelStates(parameters=400, gradients=400, optimizer_states=800, activations=100)] * 2
        record = make_good(memory=make_memory_evidence(readings=held, extra_memory=[[], []], planned=plan))
    summary = judge_memory(record).summary
    assert summary.startswith(category) and all(method in summary for method in methods)
    assert "`" not in judge_memory(memory(1, "gradients", 400)).summary, "nothing to mend"


# All that the allocator counted: 400 + 800 bytes are planned after a step, and (where it is told) 90,000 at the peak.

PEAK = ModelStates(parameters=400, gradients=400, optimizer_states=800, peak=90_000.0)


def counted(plan: ModelStates = PEAK, declared: Sequence[ExtraMemory] = (), **changes: object) -> Verdict:
    """Return the verdict on two ranks, the second with these changes."""
    fine = dataclasses.replace(
        make_memory(), peak=Bytes(parameters=400, activations=89_600), late_bytes=0, previous_steady_bytes=None
    )
    odd = dataclasses.replace(fine, **changes)
    evidence = make_memory_evidence(
        readings=[fine, odd], planned=[plan, plan], extra_memory=[[], list(declared)], live_bytes=[]
    )
    verdict = judge_memory(make_good(memory=evidence))
    assert verdict is not None
    return verdict


def steady(**more: int) -> Bytes:
    return Bytes(**{"parameters": 400, "optimizer_states": 800, **more})


def peak(num_bytes: int) -> Bytes:
    return Bytes(parameters=400, activations=num_bytes - 400)


@pytest.mark.parametrize(
    "changes, caught",
    [
        ({"steady": steady(other=10**12)}, "steady"),
        ({"peak": Bytes(parameters=400, other=10**12)}, "peak"),
        ({"steady": steady(communication=1100)}, "steady"),
        ({"steady": steady(activations=1000)}, ""),
        ({"steady": steady(inputs=10**6)}, ""),
        ({"rounding_bytes": 4000, "steady": steady(other=4000)}, ""),
        ({"peak": peak(91_000)}, ""),
        ({"peak": peak(92_000)}, "peak"),
        ({"peak": peak(88_000)}, "peak"),
        ({"peak": peak(95_000), "late_bytes": 5_000}, ""),
        ({"peak": peak(97_000), "late_bytes": 5_000}, "peak"),
        ({"peak": peak(88_000), "late_bytes": 5_000}, "peak"),
        ({"steady": steady(other=24), "previous_steady_bytes": 224}, ""),
        ({"steady": steady(other=1000), "previous_steady_bytes": 1000}, "growth"),
        ({"steady": steady(), "previous_steady_bytes": 10**6}, ""),
    ],
)
def test_everything_that_the_allocator_counted_is_judged(changes: dict[str, object], caught: str) -> None:
    verdict = counted(**changes)
    assert verdict.passed == (not caught), verdict
    assert not caught or (verdict.evidence["category"], verdict.evidence["rank"]) == (caught, 1)


@pytest.mark.parametrize(
    "num_bytes, said, unsaid", [(88_000, "fewer bytes", "in no plan"), (92_000, "in no plan", "fewer")]
)
def test_a_total_that_is_off_says_in_which_direction(num_bytes: int, said: str, unsaid: str) -> None:
    summary = counted(peak=peak(num_bytes)).summary
    assert said in summary and unsaid not in summary and "`Adapter.extra_memory`" in summary


def test_advice_asks_what_bytes_grow_with_before_it_mentions_a_declaration() -> None:
    """A declaration would have covered a real leak."""
    summary = counted(peak=peak(92_000)).summary
    asked = [summary.index(word) for word in ("depth", "micro-batches", "steps", "`Adapter.extra_memory`")]
    assert asked == sorted(asked)
    leak = lived(*(100 * step for step in range(-2, 48))).summary
    assert "cannot be declared" in leak and "extra_memory" not in leak


def lived(*growth: int, **changes: object) -> Verdict:
    """Return the verdict on two ranks: after each step the second holds `growth` bytes more than after the metered
    one."""
    fine = dataclasses.replace(make_memory(), peak=Bytes(parameters=400, activations=89_600), late_bytes=0)
    live = [{step: 7000 for step in range(len(growth))}, {step: 7000 + more for step, more in enumerate(growth)}]
    evidence = make_memory_evidence(
        readings=[fine, fine], planned=[PEAK, PEAK], extra_memory=[[], []], live_bytes=live, **changes
    )
    verdict = judge_memory(make_good(memory=evidence))
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    "growth, caught",
    [
        ((0, 0, 0, 0, 0), ""),
        ((-5000, -5000, 0, 0, 0), ""),  # states that the first update makes
        ((-2048, -1024, 0, 1024, 2048), "growth on rank 1: 1,024 ± 0 bytes a step"),
        ((-100, -50, 0, 50, 100), ""),
        ((0, 0, 0, 5000, 5000), "steady on rank 1, after step 3"),
        ((5000, 0, 0, 0, 0), "steady on rank 1, after step 0"),
        ((0, 0, 0, 900, 0), ""),
        ((0, 0, 0, *(0,) * 20, *range(0, 27 * 1024, 1024)), "growth on rank 1: "),
        (tuple(100 * step for step in range(-2, 48)), "growth on rank 1: 100 ± 0 bytes a step"),
    ],
)
def test_what_is_left_after_every_step_is_judged(growth: tuple[int, ...], caught: str) -> None:
    """A leak by its growth a step, with an interval; a buffer that comes once by its size."""
    verdict = lived(*growth)
    assert verdict.passed == (not caught), verdict
    assert verdict.summary.startswith(caught)


def test_a_memory_verdict_says_what_it_would_have_seen() -> None:
    evidence = lived(0, 0, 0, 0, 0).evidence
    assert evidence["smallest_leak_bytes"] == LEAK_BYTES["cpu"] and evidence["steps"] == 5
    assert evidence["smallest_buffer_bytes"] == SCALARS_BYTES["cpu"] + 12
    assert lived(0, 0, 0, 40, 0).evidence["smallest_leak_bytes"] > 400, "what goes up and down hides a leak"


def test_growth_is_judged_where_nothing_is_planned() -> None:
    leaking = make_memory_evidence(planned=[None, None], live_bytes=[{2: 0, 3: 1024, 4: 2048}] * 2)
    verdict = judge_memory(make_good(memory=leaking))
    assert verdict is not None and not verdict.passed
    assert judge_memory(make_good(memory=make_memory_evidence(planned=[None, None]))) is None


def test_a_peak_that_is_not_known_is_not_judged_and_the_verdict_says_so() -> None:
    """Parts of the verdict that do not need the peak are still judged."""
    unknown = counted(peak=peak(500_000), held=Bytes(activations=10**9), ends_known=False)
    assert unknown.passed and "not judged on rank 1" in unknown.summary
    assert "not judged" not in counted().summary
    hoard = counted(steady=steady(other=10**6), ends_known=False)
    assert not hoard.passed and hoard.evidence["category"] == "steady" and "not judged on rank 1" in hoard.summary


def test_what_nobody_names_is_judged_at_a_peak_that_is_not_planned_too() -> None:
    plan = dataclasses.replace(PEAK, peak=None)
    assert counted(plan, peak=peak(10**9)).passed
    assert counted(plan, peak=Bytes(parameters=400, other=1000)).passed
    assert counted(plan, peak=Bytes(parameters=400, other=10**12)).evidence["category"] == "unnamed"


def test_a_message_that_comes_when_it_comes_may_be_there_after_a_step_and_no_more_than_it() -> None:
    """The replicas of a parameter server do not wait for one another."""
    plan, passing = (
        dataclasses.replace(PEAK, peak=None),
        ExtraMemory(category="unnamed", num_bytes=5000.0, reason="push"),
    )
    for held in (0, 5000):
        assert counted(plan, declared=[passing], steady=steady(other=held), previous_steady_bytes=1200).passed, held
        assert not held or not counted(plan, steady=steady(other=held), previous_steady_bytes=1200).passed
    more = counted(plan, declared=[passing], steady=steady(other=9000), previous_steady_bytes=10200)
    assert more.evidence["category"] == "steady"
    grown = counted(plan, declared=[passing], steady=steady(other=5000), previous_steady_bytes=0)
    assert not counted(plan, declared=[passing], steady=steady(other=8000)).passed
    assert grown.evidence["category"] == "growth" and not grown.passed


def test_what_is_planned_or_declared_to_be_there_all_the_time_must_be_there() -> None:
    held = {"steady": steady(communication=5000), "previous_steady_bytes": 6200, "peak": peak(95_000)}
    random = ExtraMemory(category="steady", num_bytes=5000.0, reason="random states")
    assert counted(declared=[random], **held).passed
    assert not counted(declared=[random]).passed
    assert not counted(**held).passed
    plan = dataclasses.replace(PEAK, buffers=5000.0, peak=95_000.0)
    assert "steady on rank 0" in counted(plan).summary


def test_the_totals_are_in_the_evidence() -> None:
    evidence = counted(peak=peak(90_500), late_bytes=7).evidence
    assert (evidence["steady_bytes"], evidence["steady_planned"]) == (1224, 1200)
    assert (evidence["peak_rank"], evidence["peak_bytes"], evidence["peak_planned"]) == (1, 90_500, 90_000)
    assert evidence["peak_late"] == 7


@pytest.mark.parametrize("judge, suite", [(judge_memory, "memory"), (judge_communication, "communication")])
def test_what_could_not_be_measured_fails_with_its_reason(judge: Callable[[Record], Verdict], suite: str) -> None:
    """Though the readings and plans are not there to be judged."""
    bare = make_good(
        memory=make_memory_evidence(readings=[], planned=[], extra_memory=[]),
        traffic=make_traffic_evidence(readings=[], traffic_exceptions=[]),
    )
    verdict = judge(dataclasses.replace(bare, unmeasured={suite: "Adapter.x raised E: why"}))
    assert (verdict.suite, verdict.passed, verdict.summary) == (suite, False, "Adapter.x raised E: why")


def beside_a_twin(distance: float, of_twin: float) -> Record:
    """A gradient that is `distance` from the twin's, which is `of_twin` from the truth; noise is 1 of the truth's and a
    thousandth of the twin's."""
    record = run(1.0)
    for kind, far, noise in (("twin", distance, 1e-3), ("reference", of_twin, 1.0)):
        quantity = Quantity.parse(f"{kind}/a.weight")
        record.equivalence.deviations[quantity] = [dataclasses.replace(FINE, distance=far)] * 2
        record.equivalence.noise[quantity] = [noise] * 2
    record.equivalence.factors["twin"] = FACTOR
    return record


def test_beside_a_twin_a_thousandth_of_the_noise_decides() -> None:
    good, bad = (judge_equivalence(beside_a_twin(distance, 1.0)) for distance in (1e-3, 5e-3))
    assert good.passed and good.evidence["held_against"] == "float64 and the twin"
    assert good.evidence["detection_limit_any_direction"] == pytest.approx(FACTOR * 1e-9)
    assert judge_equivalence(run(1.0)).evidence["detection_limit_any_direction"] == pytest.approx(FACTOR * 1e-6)
    assert (bad.passed, bad.undecided) == (False, False)
    assert bad.summary == "twin/a.weight at step 1 is 5 x its noise, 1 x the twin's"


def test_a_twin_that_is_wrong_decides_nothing() -> None:
    verdict = judge_equivalence(beside_a_twin(1e3, 2 * FACTOR))
    assert (verdict.passed, verdict.undecided) == (False, True)
    assert verdict.summary == "cannot tell: the twin itself is 2 x as far from the truth as a run may be"
    wrong = beside_a_twin(1e3, 2 * FACTOR)
    wrong.equivalence.deviations[LOSS] = [dataclasses.replace(FINE, distance=2 * FACTOR)] * 2
    assert judge_equivalence(wrong).evidence["worst_quantity"] == "loss", "what is wrong by the truth is wrong"
    assert not judge_equivalence(wrong).undecided
