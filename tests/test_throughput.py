"""Tokens over the time from the ranks' common start to the last one's end, and the peak that utilisation is of."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest

from meshmark.adapters import ADAPTERS
from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.laps import student_t
from meshmark.records.record import Relaunch
from meshmark.records.request import Request, Task
from meshmark.report.tables import interval_text
from meshmark.run.runner import PeakProbe, num_cores
from meshmark.run.throughput import drift, fastest_of, peak_flops_per_second, throughput
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.theory.model_theory import model_flops_per_token
from tests.factories import make_case, make_environment, make_timed, make_timing

TOKENS = 4 * 12


def test_tokens_per_second_is_all_tokens_over_the_time_until_the_last_rank_s_end() -> None:
    """The ranks take turns in being the slowest: both end after 3 seconds, though the slowest of each step take 4."""
    found = throughput(make_timed(timing=make_timing(rank_step_seconds=[[1.0, 2.0], [2.0, 1.0]])))
    assert found.per_second == pytest.approx(TOKENS * 2 / 3)


def test_the_interval_of_the_rate_is_that_of_the_step_s_time() -> None:
    """Steps of 1 and 3 seconds in turn, 64 of each: 2 seconds in the mean."""
    found = throughput(make_timed(timing=make_timing(rank_step_seconds=[[1.0, 3.0] * 64] * 2)))
    half = student_t(127) * math.sqrt(128 / 127) / math.sqrt(128)
    assert (found.relative, found.settled) == (pytest.approx(half / 2), False)
    assert (found.lowest, found.highest) == (pytest.approx(TOKENS / (2 + half)), pytest.approx(TOKENS / (2 - half)))
    one = make_timing(rank_step_seconds=[[1.0] * 64] * 2)
    four = dataclasses.replace(one, relaunches=[Relaunch(rank_step_seconds=[[1.0] * 64] * 2)] * 3)
    assert [throughput(make_timed(timing=timing)).settled for timing in (one, four)] == [False, True]


def test_launches_that_lie_apart_widen_the_interval_however_many_their_steps() -> None:
    """With 3, 4 and 5 seconds a step, the mean rests on three numbers, not on 192."""
    again = [Relaunch(rank_step_seconds=[[seconds] * 64] * 2, rank_starts=[[0.0], [0.0]]) for seconds in (4.0, 5.0)]
    timing = dataclasses.replace(make_timing(rank_step_seconds=[[3.0] * 64] * 2), relaunches=again)
    found = throughput(make_timed(timing=timing))
    assert found.per_second == pytest.approx(TOKENS / 4) and found.num_launches == 3
    assert found.relative == pytest.approx(student_t(2) / math.sqrt(3) / 4)


def test_few_steps_that_scatter_widely_do_not_bound_the_rate() -> None:
    assert throughput(make_timed(timing=make_timing(rank_step_seconds=[[0.1, 1.9]] * 2))).highest == math.inf


def test_cases_are_tied_with_the_fastest_where_intervals_meet() -> None:
    scattered, steady, slow = (
        make_timed(timing=make_timing(num_launches=3, rank_step_seconds=[[a, b] * 8] * 2))
        for a, b in ((0.8, 1.2), (1.05, 1.06), (1.5, 1.6))
    )
    assert fastest_of([slow, steady, scattered]) == [scattered, steady]
    assert fastest_of([slow, steady]) == [steady]


def test_nothing_is_claimed_by_a_rate_of_one_launch() -> None:
    """Its steps scatter widely, so that their interval meets every other."""
    once, often = (
        make_timed(timing=make_timing(num_launches=count, rank_step_seconds=[[0.5, 1.5] * 8] * 2)) for count in (1, 3)
    )
    assert not throughput(once).ties(throughput(often)) and throughput(often).ties(throughput(often))
    assert fastest_of([once, often]) == [often] and fastest_of([once]) == []
    assert interval_text(throughput(once)) == "(1 launch)"


def test_drift_is_how_much_longer_the_second_half_takes() -> None:
    found = make_timing(rank_step_seconds=[[1.0, 1.0, 5.0, 1.5, 1.5]])
    assert drift(found) == pytest.approx(0.5), "the middle one is in neither"
    twice = dataclasses.replace(found, relaunches=[Relaunch(rank_step_seconds=[[1.0, 1.0, 5.0, 2.5, 2.5]])])
    assert drift(twice) == pytest.approx(1.0), "of each launch, not of the one against the other"
    assert drift(make_timing(rank_step_seconds=[[1.0]])) == 0


def test_mfu_is_model_operations_over_the_peak_of_all_ranks() -> None:
    record = make_timed(timing=make_timing(rank_step_seconds=[[0.5, 0.5]] * 2, peak_flops_per_second=4e9))
    per_token = model_flops_per_token(record.case.workload.model)
    assert throughput(record).mfu == pytest.approx(TOKENS / 0.5 * per_token / 4e9)
    assert throughput(make_timed(timing=make_timing(peak_flops_per_second=None))).mfu is None


def test_ranks_that_share_cores_share_their_peak(launcher: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two cores have two cores' peak, which is measured once, in one process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [num_cores(ranks) for ranks in (1, 2, 4)] == [1, 2, 2]
    probe = PeakProbe(launcher, num_gpus=0)
    two, four = (
        probe.of(
            Request(
                case=make_case(layout=Layout(dp=dp)),
                adapter=ADAPTERS["ddp"],
                task=Task.TIME,
                device="cpu",
                backend="gloo",
                steps=1,
                time_limit_seconds=60,
            )
        )
        for dp in (2, 4)
    )
    assert two is not None and two > 1e8
    assert four == two


@pytest.mark.parametrize(
    "machine, precision, ranks, nnodes, peak",
    [
        ("1 x NVIDIA H100 80GB HBM3", Precision.BF16, 1, 1, 989.4e12),
        ("8 x NVIDIA H100 80GB HBM3", Precision.BF16, 2, 1, 2 * 989.4e12),
        ("1 x NVIDIA H200", Precision.FP32, 2, 1, 67e12),
        ("1 x NVIDIA A100-SXM4-80GB", Precision.FP16, 2, 2, 2 * 312e12),
    ],
    ids=["one", "two of eight", "two ranks share one", "two nodes"],
)
def test_the_peak_of_a_known_gpu_is_its_datasheet_s_times_the_gpus_in_use(
    machine: str, precision: Precision, ranks: int, nnodes: int, peak: float
) -> None:
    record = make_timed(
        case=make_case(layout=Layout(dp=ranks), precision=precision),
        environment=make_environment(machine=machine, device="cuda", nnodes=nnodes),
    )
    found, source = peak_flops_per_second(record)
    assert found == peak
    assert source.startswith("datasheet of ")


@pytest.mark.parametrize(
    "machine, precision, device",
    [
        ("1 x NVIDIA Unheard 9000", Precision.BF16, "cuda"),
        ("1 x NVIDIA H200", Precision.FP64, "cuda"),
        ("2 CUDA devices", Precision.FP32, "cuda"),
        ("no GPU", Precision.FP32, "cuda"),
        ("1 x NVIDIA H200", Precision.FP32, "cpu"),
    ],
)
def test_a_peak_that_nobody_published_is_measured(machine: str, precision: Precision, device: str) -> None:
    record = make_timed(
        case=make_case(precision=precision), environment=make_environment(machine=machine, device=device)
    )
    assert peak_flops_per_second(record) == (3e9, "products of matrices on the cores or GPUs that the ranks share")
