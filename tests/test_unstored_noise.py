"""Noise floors that cannot be stored: the session judges by them, and says so once."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from meshmark.adapters import ADAPTERS
from meshmark.judge.deviation import Quantity
from meshmark.judge.tolerance_model import NoiseFloor
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.request import Request, Task
from meshmark.run import runner
from meshmark.run.runner import Runner, RunOptions, ToleranceModels
from meshmark.spec.workload import workload
from tests.factories import make_case

FLOOR = NoiseFloor(runs=[{Quantity.parse("loss"): [1e-7 * run, 2e-7]} for run in range(1, 4)])


def test_noise_on_a_read_only_file_system_is_measured_once_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every case had ended *unfinished* after minutes, and the next one had measured the same."""
    measured = list[str]()

    def measure(launcher: object, request: Request, num_gpus: int) -> NoiseFloor:
        measured.append(request.case.workload.name)
        return FLOOR

    def refuse(path: Path, floor: NoiseFloor) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setenv("MESHMARK_NOISE", str(tmp_path / "shared"))
    monkeypatch.setattr(runner, "launch_noise", measure)
    monkeypatch.setattr(runner, "write_noise", refuse)
    cases = [make_case(), dataclasses.replace(make_case(), workload=workload("gpt-mini"))]
    remarks = list[str]()
    with Cluster(ClusterSpec()) as cluster:
        launcher = ForkserverLauncher(cluster)
        running = Runner(launcher, ADAPTERS, RunOptions(), tmp_path / "results")
        models = ToleranceModels(launcher, tmp_path / "results", remarks, 0)
        for case in cases * 2:
            models.of(running.request(Task.OBSERVE, case))
        running.close()
        launcher.close()
    assert measured == [case.workload.name for case in cases]
    assert remarks == [
        f"noise floors cannot be stored in {str(tmp_path / 'shared')!r}: Read-only file system; they are measured anew "
        "in every session"
    ]
