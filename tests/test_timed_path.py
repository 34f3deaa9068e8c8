"""The steps on the clock must be those that were judged: where they are held against what, and the verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshmark.judge.deviation import Drift, Quantity
from meshmark.judge.observed_path import ObservedPath
from meshmark.run.launch import LaunchResult
from meshmark.run.rank_report import RankReport
from meshmark.run.record import Outcome, Status, TrainingCurves, Verdict
from meshmark.run.retracing import find_path
from meshmark.run.throughput_verdict import judge_throughput
from tests.factories import make_equivalence, make_good, make_timed, make_timing


def path(loss: float, *, repeats: bool | None) -> ObservedPath:
    """Of two steps."""
    return ObservedPath(losses=[5.5, loss], digests=["a", "b", "c"], repeats=repeats)


def judged(**changes: Any) -> Verdict:  # noqa: ANN401
    """The verdict on three timed steps; the instrumented pass did two."""
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
    assert (found.passed, found.summary) == (True, "bit for bit what was judged: 2 losses, parameters after 1 steps")
    assert found.evidence["parameters_after_last_step"] == "d"


def test_other_bits_of_an_engine_that_repeats_its_own_are_another_path() -> None:
    found = judged(observed=path(5.250000001, repeats=True))
    assert not found.passed
    assert "not what was judged: the loss of step 1 is 5.25, and 5.250000001 where" in found.summary
    found = judged(digests={1: "x", 3: "d"}, observed=path(5.25, repeats=True))
    assert not found.passed and "the parameters after 1 steps are others" in found.summary


def test_an_engine_that_never_repeats_is_held_to_the_yardstick() -> None:
    """The noise of a loss is 1e-7, its factor 4: each run may stand 4e-7 from the truth."""
    for distance, passed in ((7e-7, True), (9e-7, False)):
        found = judged(observed=path(5.25 + distance, repeats=False))
        assert found.passed is passed
        assert f"{distance / 8e-7:.2f} of the tolerance apart at step 1" in found.summary


def test_replicas_that_differ_after_the_last_timed_step_fail() -> None:
    drift = Drift(quantity=Quantity.parse("parameters/head.norm.bias"), step=1, ranks=[1])
    found = judged(drifts=[drift])
    assert not found.passed
    assert "replicas differ after timed steps: parameters/head.norm.bias on ranks [1]" in found.summary


def test_steps_that_nobody_judged_have_no_verdict() -> None:
    assert judge_throughput(make_timed(timing=make_timing(digests={1: "b"}))) is None
    assert judge_throughput(make_timed()) is None


def launched(losses: list[float]) -> LaunchResult:
    """One rank that is timed, or that retraces."""
    report = RankReport(
        rank=0, build_seconds=0, run_seconds=0, losses=losses, digests=["a", "b", "c"], timed_digests={1: "b"}
    )
    return LaunchResult(reports=[report], failures=[], seconds=1)


def test_a_path_is_sought_in_the_session_then_in_a_launch_and_its_bits_doubted_where_they_differ() -> None:
    observed = make_good(training=TrainingCurves(losses=[5.5, 5.25]))
    conformance = dataclasses.replace(observed.conformance, digests=["a", "b", "c"])
    observed = dataclasses.replace(observed, conformance=conformance)
    launches: list[LaunchResult] = []

    def retrace() -> LaunchResult:
        return launches.pop()

    assert find_path(observed, launched([5.5, 5.25, 5.0]), retrace) == path(5.25, repeats=None)
    launches = [launched([5.5, 5.25])]
    assert find_path(observed, launched([5.5, 4.0]), retrace) == path(5.25, repeats=True)
    launches = [launched([5.5, 5.125])]
    assert find_path(observed, launched([5.5, 4.0]), retrace) == path(5.25, repeats=False)
    launches = [launched([5.5, 5.25])]
    assert find_path(None, launched([5.5, 5.25]), retrace) == path(5.25, repeats=None)
    crashed = dataclasses.replace(observed, outcome=Outcome(status=Status.RAISED))
    assert find_path(crashed, launched([5.5]), retrace) is None and launches == []
