"""Runs a request in fresh processes, one a rank, and brings home whatever they leave: by whichever launcher.

The default forks ranks from a server that has PyTorch and the case's framework imported: a launch costs tenths of a
second, and no framework's global state outlives its case. This is torch elastic's model (forkserver, agent store, error
files, logs by rank) without its agent: restarts mean nothing to a measurement, and the agent's join ends the survivors
before their stacks can be read, replaces the handler of Ctrl-C, and waits for ever for a stopped process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import meshmark
from meshmark.environment import DEFAULT_THREADS
from meshmark.errors import ClusterError
from meshmark.rank_progress import Pace
from meshmark.run.cluster import LOOPBACK, Cluster, ClusterSpec
from meshmark.run.rank_info import RankInfo
from meshmark.run.rank_report import RankFailure, RankReport
from meshmark.run.request import Request
from meshmark.run.watchdog import RankProcesses, Watchdog
from meshmark.serial import decode, encode

_ANSWER_SECONDS = 60.0
"""How long other nodes may take beyond a case's time limit."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """What came home from a launch, from all nodes."""

    reports: list[RankReport]
    """By rank; ranks that failed are missing."""
    failures: list[RankFailure]
    """Root cause first."""
    seconds: float
    """From the call to the last process's end."""

    @property
    def losses(self) -> list[float]:
        """Of the global batch, by step: of passes whose ranks tell their shares."""
        return [sum(shares) for shares in zip(*(r.losses for r in self.reports), strict=True)]


class Launcher(Protocol):
    """Launches requests over a cluster, one after the other. A rank is a process that calls `perform`."""

    cluster: Cluster

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        """Run `request` on `world_size` ranks, an equal number a node; or, `alone`, all of them on this node, whatever
        the others do. No process of it is left when this returns or raises.

        Raises `ClusterError` when another node is lost; whatever happens to a rank is in the result.
        """

    def close(self) -> None:
        """End what launches share."""


class Starter(Protocol):
    """Says how the ranks of one launch on this node are to be started."""

    def __call__(self, request: Request, ranks: Sequence[RankInfo]) -> RankProcesses: ...


def launch_with(
    starter: Starter, cluster: Cluster, request: Request, world_size: int, *, alone: bool = False
) -> LaunchResult:
    """What launchers have in common: folder, time limit, evidence, the other nodes."""
    spec = ClusterSpec() if alone else cluster.spec
    others = None if spec.nnodes == 1 else cluster
    prefix = cluster.new_prefix() if others else "alone"
    started = time.monotonic()
    with _private_folder() as folder:
        ranks = _ranks(spec, world_size, prefix, folder)
        failures = Watchdog(starter(request, ranks), others, request, ranks, f"{prefix}/failed").run()
        reports = [_read_report(info) for info in ranks]
        local = {"reports": encode([r for r in reports if r]), "failures": encode(failures)}
        everyone = [local] if spec.nnodes == 1 else _exchange(cluster, prefix, local, request)
    return LaunchResult(
        reports=sorted((decode(RankReport, r) for node in everyone for r in node["reports"]), key=lambda r: r.rank),
        failures=_settle([decode(RankFailure, f) for node in everyone for f in node["failures"]]),
        seconds=time.monotonic() - started,
    )


def process_environment(spec: ClusterSpec) -> dict[str, str]:
    """Variables of all processes that run ranks, on top of this one's own; none is set here."""
    root = str(Path(meshmark.__file__).parent.parent)  # they import the checkout wherever they were started
    path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    defaults = {"OMP_NUM_THREADS": DEFAULT_THREADS}
    if spec.host in LOOPBACK:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    always = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "KINETO_LOG_LEVEL": "9",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() must not touch CUDA in a process that forks
    }
    return {**defaults, **os.environ, **always}


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Of mode 0700, and gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="meshmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ranks(spec: ClusterSpec, world_size: int, prefix: str, folder: Path) -> list[RankInfo]:
    local = world_size // spec.nnodes
    return [
        RankInfo(
            rank=spec.node_rank * local + i,
            local_rank=i,
            local_world_size=local,
            world_size=world_size,
            host=spec.host,
            port=spec.port if spec.nnodes > 1 else 0,
            prefix=prefix,
            folder=folder,
        )
        for i in range(local)
    ]


def _exchange(cluster: Cluster, prefix: str, local: Mapping[str, Any], request: Request) -> list[dict[str, Any]]:
    """What every node's ranks left; also holds the nodes to the same request."""
    mine = {**local, "request": f"{request.task} {request.case.id}"}
    texts = cluster.exchange(f"{prefix}/result", json.dumps(mine), seconds=request.time_limit_seconds + _ANSWER_SECONDS)
    everyone = [json.loads(text) for text in texts]
    if len({node["request"] for node in everyone}) > 1:
        raise ClusterError(
            f"the nodes run different cases: {[node['request'] for node in everyone]}; give each the same command"
        )
    return everyone


_BLAME = ["killed", "raised", Pace.HUNG, Pace.SLOW, Pace.WAITS]


def _settle(failures: list[RankFailure]) -> list[RankFailure]:
    """Root cause first: a rank that was killed before the peers that lost it, one that stood still amid its work before
    the peers that came on without it; else the earliest. Where all wait and none comes on, all hang."""

    def blame(failure: RankFailure) -> tuple[int, float]:
        return _BLAME.index("raised" if failure.kind == "oom" else failure.kind), failure.time

    ordered = sorted(failures, key=blame)
    if ordered and ordered[0].kind == Pace.WAITS:
        return [dataclasses.replace(failure, kind=Pace.HUNG) for failure in ordered]
    return ordered


def _read_report(info: RankInfo) -> RankReport | None:
    file = info.file("report")
    report: RankReport | None = decode(RankReport, json.loads(file.read_text())) if file.is_file() else None
    return report
