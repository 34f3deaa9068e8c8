"""A matrix launched the usual way, one torchrun command a case, over the same matrix launched by Meshmark.

Interleaved, case by case, on the same machine in the same minutes. The launch alone is that of an adapter which trains
nothing; every pass also measures the peak for 0.1 s, on both sides.
"""

from __future__ import annotations

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.goal import verdict
from meshmark.adapter.matrix import layouts
from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ADAPTERS
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher, Launcher
from meshmark.records.request import Request, Task
from meshmark.spec.case import Case
from meshmark.spec.workload import workload

ROOT = Path(__file__).parent.parent
ROUNDS = 5
"""Rounds of the launch alone."""


def main() -> int:
    targets = {"nothing": "benchmarks.nothing:Nothing", **ADAPTERS}
    cases = [
        case
        for name, target in targets.items()
        if load_adapter(target).capabilities.degrees
        and not any(requirement.missing for requirement in load_adapter(target).requires)
        for case in [Case(adapter=name, workload=workload("gpt-tiny"), layout=next(layouts(load_adapter(target), 2)))]
        if load_adapter(target).supports(case, "cpu", "gloo") is None
    ]
    started = time.monotonic()
    with Cluster(ClusterSpec()) as cluster:
        launcher = ForkserverLauncher(cluster)
        requests = [_request(case, targets[case.adapter]) for case in cases]
        launcher.launch(requests[0], 2)
        server_seconds = time.monotonic() - started  # the server's imports, paid once a run, count against us
        alone = [(_usual(requests[0]), _ours(launcher, requests[0])) for _ in range(ROUNDS)]
        rows = [(request, _usual(request), _ours(launcher, request)) for request in requests[1:]]
    for request, usual, ours in rows:
        print(f"{request.case.id:<50} torchrun {usual:5.1f} s   meshmark {ours:5.2f} s   {usual / ours:5.1f} x")
    print(f"{'forkserver, once a run':<50} {'':16} meshmark {server_seconds:5.2f} s")
    whole = sum(usual for _, usual, _ in rows) / (server_seconds + sum(ours for *_, ours in rows))
    met = [
        verdict("launch_ratio", statistics.median(u / o for u, o in alone), 8, at_least=True),
        verdict("matrix_ratio", whole, 3, at_least=True),
    ]
    return 0 if all(met) else 1


def _request(case: Case, adapter: str) -> Request:
    return Request(
        case=case,
        adapter=adapter,
        task=Task.TIME,
        device="cpu",
        backend="gloo",
        steps=10,
        warmup=3,
        time_limit_seconds=120,
    )


def _ours(launcher: Launcher, request: Request) -> float:
    launched = launcher.launch(request, 2)
    assert not launched.failures, launched.failures[0].message
    return launched.seconds


def _usual(request: Request) -> float:
    """Seconds of the whole torchrun command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.pickle"
        file.write_bytes(pickle.dumps(request))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "benchmarks.torchrun_case",
            str(file),
        ]
        started = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        if done.returncode:
            raise SystemExit(f"{request.case.id} under torchrun ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
