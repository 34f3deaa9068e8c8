"""Measure what requests are judged by: the noise of their workload and precision, once, the same on every node."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from meshmark.adapter.registry import builtin_adapters
from meshmark.errors import ClusterError, MeshmarkError, NoSpaceError
from meshmark.judge.sample import LARGEST_FULL
from meshmark.judge.tolerance_model import Comparisons, ToleranceModel, fit
from meshmark.launch.launch import Launcher
from meshmark.launch.meeting import from_node_0, meet
from meshmark.passes.noise import (
    NUM_RANKS,
    TIME_LIMIT_SECONDS,
    noise_folder,
    noise_key,
    read_noise,
    variance_ratio,
    write_noise,
)
from meshmark.records.record import Status
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode

# --- The launch that measures a noise floor.


def launch_noise(launcher: Launcher, request: Request, num_gpus: int) -> list[Comparisons]:
    """The noise runs that `request` is judged by: of PyTorch's eager kernels, whatever the case's tuning, lest a kernel
    that is wrong be excused by itself. `num_gpus`: on this node. Raises `MeshmarkError` when their processes fail."""
    measured = dataclasses.replace(
        request,
        case=dataclasses.replace(request.case, tuning=request.case.tuning.arithmetic),
        task=Task.NOISE,
        adapter=builtin_adapters()["single"],
        backend="gloo",  # they share a GPU, which NCCL refuses; nothing is sent
        time_limit_seconds=max(TIME_LIMIT_SECONDS, request.time_limit_seconds),
    )
    launched = launcher.launch(measured, num_processes(request, num_gpus), alone=True)
    if launched.failures:
        failure = launched.failures[0]
        kind = NoSpaceError if failure.kind == Status.NO_SPACE else MeshmarkError
        raise kind(f"noise of {request.case.id} could not be measured: {failure.message}\n{failure.log_tail}")
    return [run for report in launched.reports for run in report.noise_runs]


def num_processes(request: Request, num_gpus: int) -> int:
    """Processes that share the noise runs of `request`. Of a large model no two are on one GPU: each holds its model,
    its optimizer's states and a float64 truth. Of a sample every GPU has runs, until there is one for each."""
    if request.case.workload.model.num_parameters <= LARGEST_FULL or request.device != "cuda":
        return NUM_RANKS
    most = request.sample.noise_runs if request.sample else NUM_RANKS
    return max(min(most, num_gpus), 1)


# --- Tolerance models of a session, the same on every node.


class ToleranceModels:
    """Those of one session."""

    def __init__(self, launcher: Launcher, results: Path, remarks: list[str], num_gpus: int) -> None:
        """`remarks`: where is told what the reader of the next record should know. `num_gpus`: on this node."""
        self._launcher, self._results, self._remarks, self._num_gpus = launcher, results, remarks, num_gpus
        self._known: dict[str, ToleranceModel] = {}
        self._failed: dict[str, MeshmarkError] = {}
        """Why those could not be measured that were tried: to try again takes minutes, and ends the same way."""

    def forget(self) -> None:
        """All nodes know the same again: those of the disk of node 0."""
        self._known.clear()
        self._failed.clear()

    def of(self, request: Request) -> ToleranceModel:
        """The tolerance model of a request's workload and precision: from this session, from disk, or measured now.

        Raises `MeshmarkError` when the single process fails, or has failed before, for then nothing can be judged.
        """
        key = noise_key(request.case, request.steps, request.device, request.sample)
        path = noise_folder(self._results) / f"{key}.json"
        if key in self._failed:
            raise type(self._failed[key])(str(self._failed[key]))
        if key not in self._known:
            try:
                self._known[key] = fit(self._shared_runs(request, path), variance_ratio(request.case))
            except ClusterError:
                raise
            except MeshmarkError as error:
                self._failed[key] = error
                raise
        return self._known[key]

    def _shared_runs(self, request: Request, path: Path) -> list[Comparisons]:
        """Those of node 0: all nodes judge by the same."""
        cluster = self._launcher.cluster
        if cluster.spec.nnodes == 1:
            return self._runs(request, path)
        meet(cluster, request)
        limit = max(TIME_LIMIT_SECONDS, request.time_limit_seconds)
        made = from_node_0(cluster, "noise", lambda: json.dumps(encode(self._runs(request, path))), seconds=limit)
        runs: list[Comparisons] = decode(list[Comparisons], json.loads(made))
        return runs

    def _runs(self, request: Request, path: Path) -> list[Comparisons]:
        try:
            runs = read_noise(path)
        except FileNotFoundError:
            return self._measure(request, path)
        if runs is None:
            self._remarks.append(f"the noise floor {path} was damaged, and has been measured anew")
        return runs or self._measure(request, path)

    def _measure(self, request: Request, path: Path) -> list[Comparisons]:
        runs = launch_noise(self._launcher, request, self._num_gpus)
        write_noise(path, runs)
        return runs
