"""Runs a request in fresh processes, one a rank, and brings home whatever they leave: by whichever launcher.

The default forks ranks from a server that has PyTorch and the case's framework imported: a launch costs tenths of a
second, and no framework's global state outlives its case. This is torch elastic's model (forkserver, agent store, error
files, logs by rank) without its agent: restarts mean nothing to a measurement, and the agent's join ends the survivors
before their stacks can be read, replaces the handler of Ctrl-C, and waits for ever for a stopped process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import meshmark
from meshmark.environment import DEFAULT_THREADS
from meshmark.errors import NodeLostError
from meshmark.launch.cluster import LOOPBACK, Cluster, ClusterSpec
from meshmark.launch.folders import cache_variables, private_folder
from meshmark.launch.meeting import meet
from meshmark.launch.ranks import RankInfo
from meshmark.launch.watchdog import RankProcesses, Watchdog
from meshmark.passes.kernels import VARIABLES
from meshmark.rank_progress import Pace
from meshmark.records.rank_report import RankFailure, RankReport, StackState
from meshmark.records.reach import Place
from meshmark.records.record import Status
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode

# --- The network device that leads to a host. Gloo asks for its name; by default it takes the device that this
# machine's own name resolves to, which on many machines is the loopback device.

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def device_towards(host: str) -> str | None:
    """None where nobody knows, as where `host` is reached by IPv6 alone."""
    try:
        address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            mine = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex() if _address(probe, name) == mine]
    except OSError:
        return None
    return names[0] if names else None


def _address(probe: socket.socket, name: str) -> str | None:
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[: _NAME_BYTES - 1]))
        return socket.inet_ntoa(answer[20:24])
    return None


# --- Launches.

_ANSWER_SECONDS = 60.0
"""How long other nodes may take beyond a case's time limit."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """Results of a launch, from all nodes."""

    reports: list[RankReport]
    """Reports in order of rank. Ranks that failed are missing."""
    failures: list[RankFailure]
    """Root cause first."""
    seconds: float
    """From the call to the last process's end; of several nodes the longest, so that all of them know the same."""
    places: list[Place] = field(default_factory=list)
    """Places of the ranks, in order of rank."""
    lost: str = ""
    """Why nothing came home from another node; reports and failures are this node's then."""

    @property
    def losses(self) -> list[float]:
        """Losses of the global batch by step, for passes whose ranks report their shares."""
        return [sum(shares) for shares in zip(*(r.losses for r in self.reports), strict=True)]


class Launcher(Protocol):
    """Launches requests over a cluster, one after the other. A rank is a process that calls `perform`."""

    cluster: Cluster

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        """Run `request` on `world_size` ranks, an equal number a node; or, `alone`, all of them on this node, whatever
        the others do. No process of it is left when this returns or raises.

        Raises `ClusterError` when another node is lost before its ranks start, or is about to do something else;
        `NoSpaceError` when there is no room for it; whatever happens to a rank is in the result.
        """

    def close(self) -> None:
        """End what launches share."""


class Starter(Protocol):
    """Says how the ranks of one launch on this node are to be started."""

    def __call__(self, request: Request, ranks: Sequence[RankInfo]) -> RankProcesses: ...


def launch_with(
    starter: Starter, cluster: Cluster, request: Request, world_size: int, *, alone: bool = False
) -> LaunchResult:
    """Run a launch with `starter`: the part that all launchers share (folder, time limit, evidence, other nodes)."""
    spec = ClusterSpec() if alone else cluster.spec
    others = None if spec.nnodes == 1 else cluster
    prefix = cluster.new_prefix() if others else "alone"
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        watchdog, trouble = None, None
        try:
            ranks = _ranks(spec, world_size, prefix, stack.enter_context(private_folder()))
            watchdog = Watchdog(starter(request, ranks), others, request, ranks, f"{prefix}/failed")
        except Exception as error:
            trouble = error
        if others:
            meet(others, request, trouble)
        if trouble or not watchdog:
            raise trouble or AssertionError("no error and no watchdog")
        everyone, lost = _run(watchdog, others, Place(node=spec.node, switch=spec.switch), started)
    return LaunchResult(
        reports=sorted((decode(RankReport, r) for node in everyone for r in node["reports"]), key=lambda r: r.rank),
        failures=_settle([decode(RankFailure, f) for node in everyone for f in node["failures"]]),
        seconds=max(float(node["seconds"]) for node in everyone),
        places=[decode(Place, node["place"]) for node in everyone for _ in range(node["ranks"])],
        lost=lost,
    )


def _run(watchdog: Watchdog, others: Cluster | None, place: Place, started: float) -> tuple[list[dict[str, Any]], str]:
    """Return what the ranks of every node left, and an empty reason.

    If another node is lost, return what this node's ranks left, and why nothing came from the others.
    """
    failures: list[RankFailure] = []
    lost = ""
    try:
        failures = watchdog.run()
    except NodeLostError as error:
        lost = str(error)
    if others:  # whose failure was first is told by one clock
        failures = [dataclasses.replace(f, time=f.time + others.clock_ahead) for f in failures]
    reports = [_read_report(info) for info in watchdog.ranks]
    local = {
        "reports": encode([r for r in reports if r]),
        "failures": encode(failures),
        "place": encode(place),
        "ranks": len(watchdog.ranks),
        "seconds": time.monotonic() - started,
    }
    if others is None or lost:
        return [local], lost
    try:
        limit = watchdog.request.time_limit_seconds + _ANSWER_SECONDS
        texts = others.exchange("result", json.dumps(local), seconds=limit)
    except NodeLostError as error:
        return [local], str(error)
    return [json.loads(text) for text in texts], ""


def caches_freed(task: Task) -> bool:
    """Return whether the C library may keep freed memory in per-thread caches.

    By its own count cached memory is still in use. The caches fill over hundreds of calls, and the more threads there
    are the longer it takes. Tasks that measure growth therefore use no caches.
    """
    return task is not Task.ENDURE


def process_environment(spec: ClusterSpec, task: Task) -> dict[str, str]:
    """Variables of all processes that run ranks for `task`, on top of this one's own; none is set here.

    Raises `InputError` where the user has sent a framework's cache to a folder that others can write to.
    """
    root = str(Path(meshmark.__file__).parent.parent)  # they import the checkout wherever they were started
    path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    defaults = {"OMP_NUM_THREADS": DEFAULT_THREADS}
    if device := "lo" if spec.host in LOOPBACK else device_towards(spec.host):
        defaults["GLOO_SOCKET_IFNAME"] = device
        defaults["TP_SOCKET_IFNAME"] = device  # torch RPC's, which listens at the host's name otherwise, and unpickles
    always = {
        **VARIABLES,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "KINETO_LOG_LEVEL": "9",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",  # DETAIL sends more than was asked for, and DDP crashes with it
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() must not touch CUDA in a process that forks
    }
    if not caches_freed(task):
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        always["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, "glibc.malloc.tcache_count=0")))
    return {**defaults, **os.environ, **cache_variables(os.environ), **always}


def _ranks(spec: ClusterSpec, world_size: int, prefix: str, folder: Path) -> list[RankInfo]:
    local = world_size // spec.nnodes
    return [
        RankInfo(
            rank=spec.node_rank * local + i,
            local_rank=spec.local_task * local + i,
            local_world_size=spec.tasks_per_node * local,
            world_size=world_size,
            host=spec.host,
            port=spec.port if spec.nnodes > 1 else 0,
            prefix=prefix,
            folder=folder,
        )
        for i in range(local)
    ]


_BLAME: list[str] = [
    Status.NO_SPACE,
    Status.UNFINISHED,
    Status.EXITED,
    Status.KILLED,
    Status.RAISED,
    Status.UNKILLABLE,
    Pace.HUNG,
    Pace.SLOW,
    Pace.WAITS,
]
_STANDINGS = list(StackState)


def _settle(failures: list[RankFailure]) -> list[RankFailure]:
    """Root cause first: a rank that left without a word or was killed before the peers that lost it, one that stood
    still amid its work before the peers that came on without it; of those that stood still, one that answers no signal
    and one outside any collective before the peers that wait for it; else the earliest. Where all wait and none comes
    on, all hang."""

    def blame(failure: RankFailure) -> tuple[int, int, float]:
        kind = Status.RAISED if failure.kind == Status.OOM else failure.kind
        return _BLAME.index(kind), _STANDINGS.index(failure.standing), failure.time

    ordered = sorted(failures, key=blame)
    if ordered and ordered[0].kind == Pace.WAITS:
        return [dataclasses.replace(failure, kind=Pace.HUNG) for failure in ordered]
    return ordered


def _read_report(info: RankInfo) -> RankReport | None:
    file = info.file("report")
    report: RankReport | None = decode(RankReport, json.loads(file.read_text())) if file.is_file() else None
    return report
