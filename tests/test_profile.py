"""Reading of a profile, of steps made by hand and of a real run."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.flight_recorder import IssuedOperation
from meshmark.measure.profile import Activity, ActivityKind, Bandwidth, Kernel, Profile, curve, read_profile, union
from meshmark.measure.profiler import _on_gpu
from meshmark.records.record import Status
from meshmark.records.record_file import read_records
from meshmark.records.request import Task
from meshmark.report.profiles import memory_curves, profile_rows
from meshmark.run.runner import Runner, RunOptions, profile
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from tests.factories import make_profile, make_record


def computes(name: str, start: int, stop: int) -> Activity:
    return Activity(name=name, kind=ActivityKind.COMPUTE, start_ns=start, stop_ns=stop)


def sends(name: str, start: int, stop: int) -> Activity:
    return Activity(name=name, kind=ActivityKind.COMMUNICATION, start_ns=start, stop_ns=stop)


def test_a_step_is_split_into_computing_exposed_communication_and_idling() -> None:
    """Two steps of 100 and 200 ns: streams overlap, a reduction is half hidden, one call begins before the steps."""
    found = read_profile(
        [
            computes("mm", -50, 10),
            computes("mm", 20, 50),
            computes("gelu", 40, 60),
            sends("reduce", 50, 80),
            computes("mm", 120, 220),
            sends("reduce", 150, 170),
            sends("gather", 290, 400),
        ],
        [(0, 100), (100, 300)],
    )
    nano = pytest.approx
    assert found.num_steps == 2 and found.step_seconds == nano(150e-9)
    assert found.compute_seconds == nano((50 + 100) / 2 * 1e-9)
    assert found.communication_seconds == nano((30 + 20 + 10) / 2 * 1e-9)
    assert found.exposed_seconds == nano((20 + 10) / 2 * 1e-9)
    assert found.idle_seconds == nano((300 - 150 - 30) / 2 * 1e-9)
    assert found.kernels[:2] == [
        Kernel(name="mm", kind=ActivityKind.COMPUTE, seconds=70e-9, count=3),
        Kernel(name="reduce", kind=ActivityKind.COMMUNICATION, seconds=25e-9, count=2),
    ]


def test_what_an_operator_called_is_not_its_own() -> None:
    outer = Activity(name="addmm", kind=ActivityKind.COMPUTE, start_ns=0, stop_ns=50, called=((10, 15), (20, 30)))
    found = read_profile([outer, computes("copy", 10, 15), computes("copy", 20, 30)], [(0, 100)])
    assert found.compute_seconds == pytest.approx(50e-9)
    assert [(kernel.name, kernel.seconds) for kernel in found.kernels] == [("addmm", 35e-9), ("copy", 15e-9)]


def test_spans_that_touch_are_one() -> None:
    assert union([(5, 9), (0, 3), (3, 4), (6, 7), (9, 9)]) == [(0, 4), (5, 9)]


def test_a_curve_keeps_the_most_of_every_stretch() -> None:
    points = [(1000 + t, 10_000 if t == 4321 else t % 7) for t in range(0, 10_000)]
    found = curve(points, 1000)
    assert 100 <= len(found) <= 200
    assert max(found, key=lambda point: point[1]) == (round(4321e-9, 7), 10_000)
    assert curve([], 0) == [] and curve([(5, 1)], 5) == [(0.0, 1)]


def test_bus_bandwidth_is_a_ring_s_traffic_over_the_time_of_calls() -> None:
    def one(kind: str, seconds: float | None, time_ns: int = 5, num_ranks: int = 4) -> IssuedOperation:
        ranks = tuple(range(num_ranks))
        return IssuedOperation(kind=kind, time_ns=time_ns, ranks=ranks, num_bytes=1000, seconds=seconds)

    calls = [
        one("all_reduce", 1.0),
        one("all_reduce", 3.0),
        one("all_gather", 2.0),
        one("all_gather", None),
        one("barrier", 1.0),
        one("broadcast", 1.0, num_ranks=1),
        one("all_reduce", 1.0, time_ns=99),
    ]
    found = read_profile([], [(0, 10)], issued=calls).bandwidths
    assert found == [
        Bandwidth(kind="all_gather", group_size=4, count=1, num_bytes=1000, seconds=2.0),
        Bandwidth(kind="all_reduce", group_size=4, count=2, num_bytes=2000, seconds=4.0),
    ]
    assert [b.bus_bytes_per_second for b in found] == [375.0, 750.0]


def test_a_report_shows_the_longest_rank_and_draws_the_fullest(tmp_path: Path) -> None:
    def of_rank(step: float, most: int) -> Profile:
        parts = {"compute_seconds": step / 2, "communication_seconds": step / 4, "exposed_seconds": step / 8}
        return make_profile(step_seconds=step, idle_seconds=3 * step / 8, memory=[(0.0, 1), (0.5, most)], **parts)

    record = make_record(task=Task.PROFILE, profiles=[of_rank(1.0, 10), of_rank(2.0, 5)])
    (row,) = profile_rows([record, make_record()])
    assert (str(row["step"]), str(row["compute"]), str(row["communication"])) == ("2e+03 ms", "50%", "25%")
    assert (str(row["exposed"]), str(row["idle"]), row["trace"]) == ("12%", "38%", "traces/a.json.gz")
    assert memory_curves([record], tmp_path / "m.svg") and "<svg" in (tmp_path / "m.svg").read_text()
    assert not memory_curves([make_record()], tmp_path / "none.svg")


@pytest.mark.slow
def test_a_profiled_run_tells_of_every_rank_and_leaves_its_trace(tmp_path: Path) -> None:
    case = Case(adapter="ddp", workload=workload("gpt-mini"), layout=Layout(dp=2, num_micro_batches=2))
    adapters = {"ddp": "meshmark.adapters.ddp:DDP"}
    with Cluster(ClusterSpec()) as cluster, contextlib.closing(ForkserverLauncher(cluster)) as launcher:
        runner = Runner(launcher, adapters, RunOptions(), tmp_path)
        record = profile(runner, case)
        runner.close()
    assert record.outcome.status is Status.OK, record.outcome.message + record.outcome.traceback
    assert [profile.num_steps for profile in record.profiles] == [3, 3]
    for told in record.profiles:
        parts = told.compute_seconds + told.exposed_seconds + told.idle_seconds
        assert parts == pytest.approx(told.step_seconds)
        assert 0 < told.exposed_seconds <= told.communication_seconds < told.step_seconds
        assert told.compute_seconds > 0
        assert {"aten::addmm", "aten::mm"} & {kernel.name for kernel in told.kernels}, "the longest are told"
        assert [(b.kind, b.group_size) for b in told.bandwidths] == [("all_reduce", 2)]
        sent = 4 * case.workload.model.num_parameters * told.num_steps
        assert told.bandwidths[0].num_bytes == sent, "every gradient, once a step"
        assert len(told.memory) > 10
    trace = tmp_path / record.profiles[0].trace
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "gloo:all_reduce" for event in events) >= 3
    assert [r.profiles for r in read_records(tmp_path).records] == [record.profiles]


def test_ranges_that_a_program_names_are_no_kernels() -> None:
    """FSDP and NCCL name some on the GPU's own time line: taken for kernels, they fill every gap."""

    def event(name: str, start: int, stop: int, *, annotation: bool = False) -> Any:  # noqa: ANN401
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: DeviceType.CUDA,
            start_ns=lambda: start,
            end_ns=lambda: stop,
            is_user_annotation=lambda: annotation,
        )

    events = [
        event("FSDP::post_forward", 0, 100, annotation=True),
        event("gemm", 10, 40),
        event("nccl:all_reduce", 40, 90, annotation=True),
        event("ncclDevKernel_AllReduce", 60, 85),
    ]
    found = list(_on_gpu(events))
    assert [activity.name for activity in found] == ["gemm", "ncclDevKernel_AllReduce"]
    assert 100 - sum(stop - start for start, stop in union([a.span for a in found])) == 45, "idle"
    assert set(dir(events[0])) & {"is_user_annotation"} <= set(dir(torch._C._autograd._KinetoEvent)), (
        "as PyTorch has it"
    )
