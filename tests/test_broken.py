"""Engines that train on without an error, and wrongly: the equivalence suite must fail, and say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshmark.case import Case
from meshmark.cluster import Cluster, ClusterSpec
from meshmark.launch import Launcher
from meshmark.layout import Layout
from meshmark.record import Verdict
from meshmark.runner import Runner, RunOptions
from meshmark.workload import workload

BROKEN = {
    name.lower(): f"tests.broken.gradients:{name}"
    for name in ("NoReduction", "WrongMicroBatches", "NeverUpdates", "SlightScale")
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Cluster(ClusterSpec()) as cluster:
        running = Runner(
            Launcher(cluster, []),
            BROKEN | {"ddp": "adapters.ddp:DDP"},
            RunOptions(observed_steps=3),
            tmp_path_factory.mktemp("results"),
        )
        yield running
        running.close()


def judge(runner: Runner, adapter: str) -> Verdict:
    layout = Layout(dp=2, num_micro_batches=2)
    record = runner.observe(Case(adapter=adapter, workload=workload("gpt-tiny"), layout=layout))
    verdict = record.verdict("equivalence")
    assert verdict is not None, record.outcome.message
    return verdict


def test_the_adapter_that_they_break_passes(runner: Runner) -> None:
    verdict = judge(runner, "ddp")
    assert verdict.passed, verdict.summary
    assert verdict.evidence["ratio"] < 2  # type: ignore[operator]
    assert verdict.evidence["detection_limit"] < 1e-4  # type: ignore[operator]


def test_gradients_that_are_not_reduced(runner: Runner) -> None:
    verdict = judge(runner, "noreduction")
    assert not verdict.passed
    assert verdict.evidence["failing"] > 50  # type: ignore[operator]


def test_gradients_divided_by_micro_batches_once_too_often(runner: Runner) -> None:
    verdict = judge(runner, "wrongmicrobatches")
    assert not verdict.passed
    assert verdict.evidence["multiple_of_truth"] == pytest.approx(0.5, rel=1e-5)


def test_weights_that_never_change(runner: Runner) -> None:
    verdict = judge(runner, "neverupdates")
    assert not verdict.passed
    assert str(verdict.evidence["worst_quantity"]).startswith("parameters/")


def test_one_gradient_off_by_a_hundred_thousandth(runner: Runner) -> None:
    verdict = judge(runner, "slightscale")
    assert not verdict.passed
    assert verdict.evidence["worst_quantity"] == "gradients/blocks.1.attention_norm.weight"
