"""The peak that utilisation is of: measured once a session, while no ranks run."""

from __future__ import annotations

import dataclasses
import json
import os

from meshmark.adapter.registry import builtin_adapters
from meshmark.environment import DEFAULT_THREADS
from meshmark.errors import MeshmarkError
from meshmark.launch.launch import Launcher
from meshmark.launch.meeting import READY_SECONDS, meet
from meshmark.records.request import Request, Task


class PeakProbe:
    """Measures what a number of cores, or a GPU, of this node can compute, and remembers it."""

    def __init__(self, launcher: Launcher, num_gpus: int) -> None:
        self.launcher, self.num_gpus = launcher, num_gpus
        self._measured: dict[tuple[str, int, str, str], float | None] = {}
        """Measured peaks by device, cores, precision and tuning of matrix products."""

    def of(self, request: Request) -> float | None:
        """Return the peak of all cores or GPUs that the ranks of `request` can use, or None if the probe failed.

        Each core or GPU is counted once, however many ranks share it. For several nodes it is the sum of what each
        measured.
        """
        nnodes = self.launcher.cluster.spec.nnodes
        on_cpu, local_ranks = request.device == "cpu", request.case.world_size // nnodes
        num_threads = num_cores(local_ranks) if on_cpu else 1
        case = request.case
        key = request.device, num_threads, str(case.precision.compute), str(case.tuning.arithmetic)
        if key not in self._measured:
            self._measured[key] = self._of_all_nodes(request, num_threads)
        one = self._measured[key]
        return one and one * (1 if on_cpu else max(1, min(local_ranks, self.num_gpus)))

    def _of_all_nodes(self, request: Request, num_threads: int) -> float | None:
        """The same sum on each; a call of all nodes."""
        cluster = self.launcher.cluster
        if cluster.spec.nnodes == 1:
            return self._measure(request, num_threads)
        meet(cluster, request)
        mine = json.dumps(self._measure(request, num_threads))
        every = [
            json.loads(t) for t in cluster.exchange("peak", mine, seconds=request.time_limit_seconds + READY_SECONDS)
        ]
        return None if None in every else sum(every)

    def _measure(self, request: Request, num_threads: int) -> float | None:
        probe = dataclasses.replace(
            request,
            task=Task.PEAK,
            adapter=builtin_adapters()["single"],
            backend="gloo",
            num_threads=num_threads,
        )
        try:
            launched = self.launcher.launch(probe, 1, alone=True)
        except MeshmarkError:  # the launch that it is for meets the same, and tells
            return None
        return launched.reports[0].flops_per_second if launched.reports else None


def num_cores(local_ranks: int) -> int:
    """Return the number of cores of this node that `local_ranks` ranks can use with their threads."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or DEFAULT_THREADS)
    return min(local_ranks * threads, len(os.sched_getaffinity(0)))
