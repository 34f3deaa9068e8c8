"""The launch that measures a noise floor."""

from __future__ import annotations

import dataclasses

from meshmark.adapter.registry import builtin_adapters
from meshmark.errors import MeshmarkError, NoSpaceError
from meshmark.judge.sample import LARGEST_FULL
from meshmark.judge.tolerance_model import Comparisons
from meshmark.run.launch import Launcher
from meshmark.run.passes.noise import NUM_RANKS, TIME_LIMIT_SECONDS
from meshmark.run.record import Status
from meshmark.run.request import Request, Task


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
