"""The steps on the clock must be those that were judged: where they are held against what, and the verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshmark.algorithms.downpour import Downpour
from meshmark.judge.deviation import Drift, ObservedPath, Quantity
from meshmark.launch.launch import LaunchResult
from meshmark.records.rank_report import RankReport
from meshmark.records.record import Outcome, Record, Relaunch, Status, TrainingCurves, Verdict
from meshmark.run.runner import find_path
from meshmark.run.verdict import judge_throughput
from meshmark.spec.algorithm import algorithm_classes
from tests.factories import make_equivalence, make_good, make_timed, make_timing


def path(loss: float, *, repeats: bool | None, end: str = "d") -> ObservedPath:
    """Return the path of two judged steps, and a third."""
    return ObservedPath(losses=[5.5, loss, 5.0], digests=["a", "b", "c"], later={3: end}, repeats=repeats)


def judged(**changes: Any) -> Verdict:  # noqa: ANN401
    """The verdict on three timed steps; the instrumented pass did two, and what retraces it all three."""
    drifts = changes.pop("drifts", [])
    timing = {"digests": {1: "b", 3: "d"}, "observed": path(5.25, repeats=None), **changes}
    verdict = judge_throughput(
        make_timed(
            training=TrainingCurves(losses=[5.5, 5.25, 5.0]),
            equivalence=make_equivalence(drifts=drifts),
            timing=make_timing(**timing),
        )
    )
    assert verdict is not None
    return verdict


def test_timed_steps_are_those_that_were_judged_bit_for_bit() -> None:
    found = judged()
    assert (found.passed, found.summary) == (
        True,
        "bit for bit what was judged: 3 losses, parameters after 1 and 3 steps",
    )
    assert found.evidence["parameters_after_last_step"] == "d"


def test_other_bits_of_an_engine_that_repeats_its_own_are_another_path() -> None:
    found = judged(observed=path(5.250000001, repeats=True))
    assert not found.passed
    assert "not what was judged: the loss of step 1 is 5.25, and 5.250000001 where" in found.summary
    found = judged(digests={1: "x", 3: "d"}, observed=path(5.25, repeats=True))
    assert not found.passed and "the parameters after 1 steps are others" in found.summary
    found = judged(observed=path(5.25, repeats=True, end="x"))
    assert not found.passed and "the parameters after 3 steps are others" in found.summary
    late = dataclasses.replace(path(5.25, repeats=True), losses=[5.5, 5.25, 5.000000001])
    assert (
        "not what was judged: the loss of step 2 is 5.0, and 5.000000001 where the calls"
        in judged(observed=late).summary
    )


def again(losses: list[float], end: str = "d") -> Relaunch:
    return Relaunch(rank_step_seconds=[[0.5, 0.25, 0.5]] * 2, losses=losses, digests={1: "b", 3: end})


def test_every_launch_is_held_to_the_path_and_named() -> None:
    right = [5.5, 5.25, 5.0]
    found = judged(relaunches=[again(right), again(right)])
    assert found.passed and found.summary.endswith("after 1 and 3 steps, in each of 3 launches")
    for other in (again([5.5, 5.25, 4.0]), again(right, end="x")):
        found = judged(relaunches=[again(right), other], observed=path(5.25, repeats=True))
        assert not found.passed and "in launch 3 of 3" in found.summary
    found = judged(relaunches=[again([5.5, 5.25 + 9e-7, 5.0])], observed=path(5.25, repeats=False))
    assert not found.passed and "of the tolerance at step 1" in found.summary


def test_an_engine_that_never_repeats_is_held_to_the_tolerance_model() -> None:
    """The noise of a loss is 1e-7, its factor 4: each run may stand 4e-7 from the truth."""
    for distance, passed in ((7e-7, True), (9e-7, False)):
        found = judged(observed=path(5.25 + distance, repeats=False))
        assert found.passed is passed
        assert f"differ by {distance / 8e-7:.2f} of the tolerance at step 1" in found.summary


def test_under_a_parameter_server_two_passes_that_agree_prove_nothing() -> None:
    """Chance decides which replica comes first. Other bits are then judged by the tolerance model all the same."""
    by_chance, exact = Downpour(), algorithm_classes()["synchronous"]()
    for repeats, left in ((False, True), (True, True), (None, False)):
        assert path(5.25, repeats=repeats).is_left_to_tolerance(by_chance) is left
        assert path(5.25, repeats=repeats).is_left_to_tolerance(exact) is (repeats is False)


def test_replicas_that_differ_after_the_last_timed_step_fail() -> None:
    drift = Drift(quantity=Quantity.parse("parameters/head.norm.bias"), step=1, ranks=[1])
    found = judged(drifts=[drift])
    assert not found.passed
    assert "replicas differ after timed steps: parameters/head.norm.bias on ranks [1]" in found.summary


def test_steps_that_nobody_judged_have_no_verdict() -> None:
    assert judge_throughput(make_timed(timing=make_timing(digests={1: "b"}))) is None
    assert judge_throughput(make_timed()) is None


def launched(losses: list[float], digests: dict[int, str] | None = None, left_out: int = 0) -> LaunchResult:
    """One rank that is timed, or that retraces."""
    report = RankReport(
        rank=0,
        build_seconds=0,
        run_seconds=0,
        losses=losses,
        digests=["a", "b", "c"],
        timed_digests=digests or {3: "d"},
        left_out=left_out,
    )
    return LaunchResult(reports=[report], failures=[], seconds=1)


def test_the_path_is_the_judged_steps_and_what_comes_of_them_and_its_bits_are_doubted_where_they_differ() -> None:
    observed = make_good(training=TrainingCurves(losses=[5.5, 5.25]))
    conformance = dataclasses.replace(observed.conformance, digests=["a", "b", "c"])
    observed = dataclasses.replace(observed, conformance=conformance)
    launches: list[LaunchResult] = []

    def retrace() -> LaunchResult:
        return launches.pop(0)

    right, late = [5.5, 5.25, 5.0], [5.5, 5.25, 4.0]

    def sought(record: Record | None, losses: list[float], *retraced: list[float]) -> ObservedPath | None:
        launches.extend(launched(again) for again in retraced)
        found = find_path(record, [launched(right), launched(losses, {1: "b", 3: "d"})], retrace)
        assert launches == []
        return found

    assert sought(observed, right, right) == path(5.25, repeats=None)
    assert sought(None, right, right) == path(5.25, repeats=None)
    assert sought(observed, late, right, right) == path(5.25, repeats=True)
    assert sought(observed, late, right, late) == path(5.25, repeats=False)
    assert sought(observed, [5.5, 5.125, 5.0], [5.5, 5.125, 5.0]) == path(5.25, repeats=False)
    crashed = dataclasses.replace(observed, outcome=Outcome(status=Status.RAISED))
    assert sought(crashed, right) is None


def test_a_pass_that_tried_again_tells_nothing_of_the_clock_s_bits() -> None:
    """It has trained on other batches since."""
    observed = make_good(training=TrainingCurves(losses=[5.5, 5.0], left_out=1))
    found = find_path(observed, [launched([5.5, 5.25, 5.0])], lambda: launched([5.5, 5.25, 5.0], left_out=1))
    assert found == dataclasses.replace(path(5.25, repeats=None), left_out=1)
