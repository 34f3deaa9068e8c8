"""What grows with a run, and how fast: a launch with its ranks, a meeting of all launchers with their number, and the
gathering of a trace with parameters. Every exponent is fitted to what was measured here, with its 95 % interval; the
seconds of 64 nodes of 8 ranks are extrapolated by it where this machine does not bear as many processes, and say so.

Ranks train nothing. Nodes are launchers in processes of their own on this machine, which talk through node 0's store
as those of a cluster do. Seconds are a wall clock's; best of a few, for a busy machine only adds to them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from benchmarks.goal import verdict
from meshmark.judge.trace import gather_arrays
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.laps import student_t
from meshmark.records.request import Request, Task
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

RANKS, NODES = (4, 8, 16, 32, 64), (4, 8, 16, 32, 64)
ELEMENTS = (10**5, 10**6, 10**7, 3 * 10**7)
ROUNDS = 3
RANK_BYTES = 100 * 2**20
"""Of memory that a light rank may take: as many are started as there is room for, and 64 at most."""
MOST_SECONDS = 20.0
"""A launch that took longer is the last."""
GOAL_RANKS = 512
GOALS = {"launch": 1.5, "meeting": 2.0, "gather": 1.1}
"""Exponents. Every rank of a launch opens a connection to every other (gloo's mesh), and every node is told what all
others bring; neither may cost more than that, and a trace no more than its bytes."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """seconds = scale x size^exponent."""

    exponent: float
    half_width: float
    """Of the exponent's 95 % interval."""
    scale: float

    def at(self, size: float) -> float:
        return float(self.scale * size**self.exponent)


def fitted(sizes: Sequence[float], seconds: Sequence[float]) -> Growth:
    """By least squares of the logarithms."""
    x, y = np.log(sizes), np.log(seconds)
    slope, intercept = np.polyfit(x, y, 1)
    left = y - slope * x - intercept
    degrees = len(x) - 2
    error = math.sqrt(float(left @ left) / degrees / float(((x - x.mean()) ** 2).sum())) if degrees > 0 else math.inf
    half_width = student_t(degrees) * error if degrees > 0 else math.inf
    return Growth(exponent=float(slope), half_width=half_width, scale=math.exp(float(intercept)))


def report_growth(name: str, unit: str, sizes: Sequence[int], seconds: Sequence[float]) -> bool:
    for size, took in zip(sizes, seconds, strict=True):
        print(f"{name} of {size:,} {unit}: {took:.3g} s")
    growth = fitted(sizes, seconds)
    print(f"{name}: seconds grow as {unit} to the power {growth.exponent:.2f} ± {growth.half_width:.2f}")
    if unit == "ranks":
        print(f"{name} of {GOAL_RANKS} {unit}, extrapolated: {growth.at(GOAL_RANKS):.3g} s")
    return verdict(f"{name}_exponent", growth.exponent, GOALS[name], at_least=False)


def launches() -> bool:
    """Of the upper sizes alone: below, the start of one process is all that there is."""
    bears = min(RANKS[-1], _available_bytes() // RANK_BYTES)
    sizes, seconds = list[int](), list[float]()
    with Cluster(ClusterSpec()) as cluster:
        launcher = ForkserverLauncher(cluster)
        for ranks in (size for size in RANKS if size <= bears):
            request = _request(ranks)
            launched = [launcher.launch(request, ranks) for _ in range(ROUNDS)]
            assert not any(one.failures for one in launched), launched[0].failures[0].message
            sizes.append(ranks)
            seconds.append(min(one.seconds for one in launched))
            if seconds[-1] > MOST_SECONDS:
                break
        launcher.close()
    return report_growth("launch", "ranks", sizes, seconds)


def _request(ranks: int) -> Request:
    fed = replace(workload("gpt-mini"), global_batch=ranks)
    case = Case(adapter="nothing", workload=fed, layout=Layout(dp=ranks))
    return Request(
        case=case,
        adapter="benchmarks.nothing:Nothing",
        task=Task.TIME,
        device="cpu",
        backend="gloo",
        steps=1,
        assess=False,
        time_limit_seconds=120,
    )


def _available_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 2**32


def meetings() -> bool:
    return report_growth("meeting", "nodes", NODES, [_together(_meet, nodes) for nodes in NODES])


def _meet(node: int, nodes: int, port: int) -> float:
    """Seconds of a meeting at which every node brings what it tells of 8 ranks."""
    spec, brought = ClusterSpec(nnodes=nodes, node_rank=node, rdzv=f"127.0.0.1:{port}"), "x" * 8 * 2000
    with Cluster(spec) as cluster:
        took = []
        for number in range(ROUNDS + 1):
            cluster.exchange(f"ready {number}", "", seconds=120)
            started = time.monotonic()
            cluster.exchange(f"result {number}", brought, seconds=120)
            took.append(time.monotonic() - started)
    return min(took[1:])


def gatherings() -> bool:
    """Of two ranks: a trace is gathered on one host, whatever the number of ranks that share it."""
    seconds = [_together(lambda rank, ranks, port, n=n: _gather(rank, port, n), 2) for n in ELEMENTS]
    return report_growth("gather", "parameters", ELEMENTS, seconds)


def _gather(rank: int, port: int, elements: int) -> float:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    part, took = np.ones(elements // 2, dtype=np.float32), []
    for _ in range(ROUNDS):
        dist.barrier()
        started = time.monotonic()
        gather_arrays([part])
        took.append(time.monotonic() - started)
    dist.barrier()
    dist.destroy_process_group()
    return min(took)


def _together(work: Callable[[int, int, int], float], count: int) -> float:
    """The median of what `count` forked processes tell of their share of `work`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    running = [context.Process(target=lambda i=i: answers.put(work(i, count, port))) for i in range(count)]
    for process in running:
        process.start()
    for process in running:
        process.join(150)
    if wrong := [process.exitcode for process in running if process.exitcode != 0]:
        for process in running:
            process.kill()
        raise SystemExit(f"{len(wrong)} of {count} processes ended with {wrong[0]}")
    return statistics.median(answers.get() for _ in running)


def main() -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("MESHMARK_RDZV_SECRET", os.urandom(16).hex())
    met = [meetings(), gatherings(), launches()]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
