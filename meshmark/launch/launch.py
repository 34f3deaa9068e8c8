"""Run a request in fresh processes, one per rank, and collect their results.

There are two launchers. One starts ranks by torchrun. The default forks ranks from a server that has PyTorch and the
case's framework imported. A launch then takes tenths of a second, and no framework's global state outlives its case.
This is torch elastic's model (forkserver, agent store, error files, logs by rank) without its agent. A measurement does
not need restarts. The agent also ends the survivors before their stacks can be read, replaces the handler of Ctrl-C,
and waits forever for a stopped process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from meshmark.adapter.registry import load_adapter
from meshmark.environment import DEFAULT_THREADS, interpreter_of
from meshmark.errors import InputError, NodeLostError
from meshmark.launch.cluster import LOOPBACK, Cluster, ClusterSpec, meet
from meshmark.launch.folders import cache_variables, import_folder, private_folder
from meshmark.launch.fork_server import LAUNCHER, ForkServer, execute
from meshmark.launch.processes import (
    await_cleaners,
    end_children,
    end_started_with,
    process_state,
    unseen_exit_code,
)
from meshmark.launch.rank import RankInfo, run_forked_rank
from meshmark.launch.watchdog import RankProcesses, Watchdog
from meshmark.passes.kernels import VARIABLES
from meshmark.rank_progress import EXPLAIN_SECONDS, Pace
from meshmark.records.rank_report import RankFailure, RankReport, StackState
from meshmark.records.record import Place, Status
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
    """Seconds from the call to the end of the last process. The maximum over nodes, so that all nodes agree."""
    places: list[Place] = field(default_factory=list)
    """Places of the ranks, in order of rank."""
    lost: str = ""
    """Why another node sent no results, or an empty string. Reports and failures are then those of this node only."""

    @property
    def losses(self) -> list[float]:
        """Losses of the global batch by step, for passes whose ranks report their shares."""
        return [sum(shares) for shares in zip(*(r.losses for r in self.reports), strict=True)]


class Launcher(Protocol):
    """Launches requests over a cluster, one after the other. A rank is a process that calls `perform`."""

    cluster: Cluster

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        """Run `request` on `world_size` ranks, equally many per node. None of its processes outlives this call.

        With `alone`, all ranks run on this node, independently of other nodes. A rank's failure is part of the result.
        Raises `ClusterError` if another node is lost before its ranks start or is about to run something else, and
        `NoSpaceError` if there is no room for the launch.
        """

    def close(self) -> None:
        """End the processes that launches share."""


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
    if others:  # times of failures are compared between nodes, on node 0's clock
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
        limit = watchdog.request.time_limit_seconds + EXPLAIN_SECONDS + _ANSWER_SECONDS
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


_CONFIGURING = ("ACCELERATE_", "FSDP_", "HOROVOD_", "LT_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "PL_", "TORCH_FORCE_")
"""Prefixes of variables that configure a framework. Ranks do not get them, because a case defines how it is trained."""
_OF_LAUNCHERS = ("AZUREML_", "JSM_", "LSB_", "MV2_", "OMPI_", "PMI_", "PMIX_", "SLURM_")
"""Prefixes of variables in which another launcher sets a process's rank. Frameworks would use it as the rank's."""


def unheeded_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that configure a framework, and that no rank is given."""
    return sorted(name for name in environment if name.startswith(_CONFIGURING))


def process_environment(spec: ClusterSpec, task: Task, python: str = sys.executable) -> dict[str, str]:
    """Return all environment variables of processes of `python` that run ranks for `task`. Does not change this
    process's own.

    They are this process's variables, without those that configure a framework or place a rank, and with Meshmark's
    settings. Raises `InputError` if the user's variables name a cache folder that others can write to, or a network
    interface that does not exist here.
    """
    expect_interfaces(os.environ)
    path = [import_folder(python), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    defaults = {"OMP_NUM_THREADS": DEFAULT_THREADS}
    if device := "lo" if spec.host in LOOPBACK else device_towards(spec.host):
        defaults["GLOO_SOCKET_IFNAME"] = device
        defaults["TP_SOCKET_IFNAME"] = device  # torch RPC's, which listens at the host's name otherwise, and unpickles
    always = {
        **VARIABLES,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
        "KINETO_LOG_LEVEL": "9",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",  # DETAIL sends more than was asked for, and DDP crashes with it
        # Frameworks warn of their own deprecations. That is no error of what is judged.
        "PYTHONWARNINGS": re.sub(r"(^|,)\s*error\b", r"\1default", os.environ.get("PYTHONWARNINGS", "")),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() must not touch CUDA in a process that forks
    }
    if not caches_freed(task):
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        always["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, "glibc.malloc.tcache_count=0")))
    own = {name: value for name, value in os.environ.items() if not name.startswith((*_CONFIGURING, *_OF_LAUNCHERS))}
    return {**defaults, **own, **cache_variables(os.environ), **always}


def expect_interfaces(environment: Mapping[str, str]) -> None:
    """Raise `InputError` if variables send gloo or torch RPC to a network interface that is not here."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        asked = [name for name in environment.get(variable, "").split(",") if name]
        if missing := [name for name in asked if name not in here]:
            raise InputError(
                f"{variable}={environment[variable]} in the environment: no network interface is called {missing[0]!r} "
                f"here; expected some of {', '.join(here)}, or unset it"
            )


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
_STACK_STATES = list(StackState)


def _settle(failures: list[RankFailure]) -> list[RankFailure]:
    """Sort failures, with the root cause first.

    A rank that exited without a report or was killed comes before the peers that lost it. A rank that made no progress
    in its work comes before the peers that did. Of ranks without progress, one that answers no signal and one outside
    any collective come before the peers that wait for them. Otherwise the earliest comes first. If all ranks wait and
    none makes progress, all count as hung.
    """

    def blame(failure: RankFailure) -> tuple[int, int, float]:
        kind = Status.RAISED if failure.kind == Status.OOM else failure.kind
        return _BLAME.index(kind), _STACK_STATES.index(failure.stack_state), failure.time

    ordered = sorted(failures, key=blame)
    if ordered and ordered[0].kind == Pace.WAITS:
        return [dataclasses.replace(failure, kind=Pace.HUNG) for failure in ordered]
    return ordered


def _read_report(info: RankInfo) -> RankReport | None:
    file = info.file("report")
    report: RankReport | None = decode(RankReport, json.loads(file.read_text())) if file.is_file() else None
    return report


# --- The default launcher. It forks ranks from a server that has PyTorch and the case's framework imported.

_ALWAYS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "torch._dynamo",
    "torch._inductor",
    "meshmark.launch.rank",
)
"""Modules that every rank needs.

The first optimizer imports `torch._dynamo`, and the first profile `torch._inductor`. In a rank of a small model, these
imports would take half of its time.
"""
_IMPORT_SECONDS = 300.0
"""Time in seconds to import PyTorch from a slow disk. For a framework, the case's time limit counts if it is longer."""
KILL_SECONDS = 10.0
"""Time in seconds after SIGKILL after which a rank counts as unkillable."""


class ForkserverLauncher:
    """Launcher with one server for each set of frameworks and their variables, branched from one that has PyTorch."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._trunks: dict[tuple[bool, str], ForkServer] = {}
        """Servers that the others are branched from; they fork no ranks.

        They are keyed by interpreter, and by whether freed memory is cached, which the C library reads when a process
        starts.
        """
        self._servers: dict[tuple[bool, str, tuple[str, ...], tuple[tuple[str, str], ...]], ForkServer] = {}
        """Servers by trunk, modules and environment, started when they are first needed."""

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        return launch_with(self._start, self.cluster, request, world_size, alone=alone)

    def close(self) -> None:
        for server in [*self._servers.values(), *self._trunks.values()]:
            server.close()
        self._servers, self._trunks = {}, {}

    def _start(self, request: Request, ranks: Sequence[RankInfo]) -> ForkedRanks:
        return ForkedRanks(self._server(request), request, ranks)

    def _server(self, request: Request) -> ForkServer:
        """The server for a request's adapter. Raises `MeshmarkError` when its imports take too long."""
        adapter = load_adapter(request.adapter)
        modules = [*adapter.modules(), *request.case.workload.model.preload]
        environment = adapter.environment(request.device)
        name = adapter.virtual_environment
        python = str(interpreter_of(name)) if name else sys.executable
        key = caches_freed(request.task), python, tuple(modules), tuple(sorted(environment.items()))
        if key not in self._servers or _is_gone(self._servers[key]):
            self._servers[key] = self._root(request.task, python).branch(environment, modules)
            limit = max(_IMPORT_SECONDS, request.time_limit_seconds)
            self._servers[key].await_ready(", ".join(modules) or "nothing", seconds=limit)
        return self._servers[key]

    def _root(self, task: Task, python: str) -> ForkServer:
        key = caches_freed(task), python
        if key in self._trunks and _is_gone(self._trunks[key]):
            self.close()
        if key not in self._trunks:
            environment = process_environment(self.cluster.spec, task, python)
            self._trunks[key] = ForkServer.start(environment, _ALWAYS, python)
            self._trunks[key].await_ready("torch", seconds=_IMPORT_SECONDS)
        return self._trunks[key]


def _is_gone(server: ForkServer) -> bool:
    """Return whether a server is gone or does not reply. If it does not reply, as when stopped, it is ended."""
    return server.is_gone or not server.serves()


class ForkedRanks:
    """The ranks of one launch."""

    grace_seconds = 2.0

    def __init__(self, server: ForkServer, request: Request, ranks: Sequence[RankInfo]) -> None:
        self._server, self._request, self._ranks = server, request, ranks
        self._pids: dict[int, int] = {}

    def start(self) -> None:
        for info in self._ranks:
            self._pids[info.rank] = self._server.call(run_forked_rank, self._request, info)

    def wait(self, seconds: float) -> None:
        self._server.listen(seconds)

    def pid(self, info: RankInfo) -> int | None:
        return self._pids.get(info.rank)

    def exit_code(self, info: RankInfo) -> int | None:
        """Return the exit code, read without the server if necessary, because the server may be stopped."""
        pid = self._pids.get(info.rank)
        if pid is None:
            return None
        code = self._server.exit_code(pid)
        return unseen_exit_code(pid) if code is None else code

    def spared(self, info: RankInfo) -> bool:
        return False

    @property
    def is_gone(self) -> bool:
        return self._server.is_gone

    def end(self) -> list[int]:
        started = [(info, pid) for info in self._ranks if (pid := self._pids.get(info.rank)) is not None]
        for info, pid in started:
            if self.exit_code(info) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        while (left := self._running()) and time.monotonic() < deadline:
            self._server.listen(0.1)
        _await_cleaners(self._ranks)
        for info, pid in started:
            self._kill_group(info, pid)
        if left:
            self._server.close()  # whoever comes next gets a server without such children
        elif not self._server.is_gone:
            end_children(self._server.pid)  # what the ranks had started in sessions of its own
        _end_started_by(self._ranks)
        return left

    def _kill_group(self, info: RankInfo, pid: int) -> None:
        """Kill the process group of a rank, which includes what it started."""
        has_ended = self.exit_code(info) is not None
        if has_ended and not self.is_gone and process_state(pid) not in ("", "Z"):
            return  # it ended long ago, and its id now belongs to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _running(self) -> list[int]:
        return [info.rank for info in self._ranks if self.pid(info) and self.exit_code(info) is None]


def _await_cleaners(ranks: Sequence[RankInfo]) -> None:
    """Let processes that remove the shared memory of ranks do so, before they are ended too."""
    await_cleaners("TMPDIR", str(ranks[0].folder))


def _end_started_by(ranks: Sequence[RankInfo]) -> None:
    """End what the ranks of a launch had started and their server did not adopt, for example because it was killed.

    It inherits TMPDIR, which is the launch's own folder.
    """
    end_started_with("TMPDIR", str(ranks[0].folder))


# --- A launcher that runs one plain torchrun command per launch. It is slow, but most training is started this way.

_START_SECONDS = 60.0
_FAILED_RANK = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)")
"""As torchrun's summary of a failure has it."""


class TorchrunLauncher:
    """Launcher for one node that uses torchrun. Its commands are children of a server, which adopts what their ranks
    leave behind.
    """

    def __init__(self, cluster: Cluster) -> None:
        """Raises `InputError` when there are several nodes: their agents would meet at a port open to everybody."""
        if cluster.spec.nnodes > 1:
            raise InputError(
                f"--launcher torchrun with {cluster.spec.nnodes} nodes: it runs on one; the default runs on any number"
            )
        self.cluster = cluster
        self._server: ForkServer | None = None

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        return launch_with(self._start, self.cluster, request, world_size, alone=alone)

    def close(self) -> None:
        if self._server:
            self._server.close()
        self._server = None

    def _start(self, request: Request, ranks: Sequence[RankInfo]) -> TorchrunRanks:
        environment = process_environment(self.cluster.spec, request.task)
        if self._server is None or self._server.is_gone or not self._server.serves():
            self._server = ForkServer.start(environment, [])
            self._server.await_ready("nothing", seconds=_START_SECONDS)
        environment |= load_adapter(request.adapter).environment(request.device)
        return TorchrunRanks(self._server, request, ranks, environment)


class TorchrunRanks:
    """The ranks of one launch, observed through their files in its folder, and the agent that started them."""

    grace_seconds = 40.0
    """The agent ends the other ranks within 30 s, and then reports which of them were killed."""

    def __init__(
        self, server: ForkServer, request: Request, ranks: Sequence[RankInfo], environment: dict[str, str]
    ) -> None:
        self._server, self._request, self._ranks = server, request, ranks
        self._folder = ranks[0].folder
        self._agent: int | None = None
        self._environment = environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # what the launcher can import
            LAUNCHER: str(os.getpid()),
            "TMPDIR": str(self._folder),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the agent would listen for its ranks, and for everybody
        }

    def start(self) -> None:
        file = self._folder / "request.json"
        file.write_text(json.dumps(encode(self._request)))
        assert decode(Request, json.loads(file.read_text())) == self._request, (
            "what ranks are asked is not what is read"
        )
        self._agent = self._server.call(execute, self._command(file), self._environment, str(self._log))

    def _command(self, request: Path) -> list[str]:
        """Return the torchrun command. The agent's rendezvous is a file.

        With `--standalone` it would open a port, and unpickle what it reads there.
        """
        rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint={self._folder}/rendezvous --rdzv-conf=store_type=file"
        count = f"--nnodes=1 --nproc-per-node={len(self._ranks)}"
        python = [sys.executable, "-P"]  # without the working directory on the path, which may be a stranger's
        torchrun = [*python, "-m", "torch.distributed.run", *rendezvous.split(), *count.split(), "--no-python"]
        return [*torchrun, *python, "-m", "meshmark.launch.rank", str(request)]

    @property
    def _log(self) -> Path:
        return self._folder / "torchrun"

    def wait(self, seconds: float) -> None:
        self._server.listen(seconds)

    def pid(self, info: RankInfo) -> int | None:
        """Return the rank's process id, or None before the rank has written it."""
        file = info.file("pid")
        text = file.read_text() if file.is_file() else ""
        return int(text) if text else None

    def exit_code(self, info: RankInfo) -> int | None:
        """Return the rank's exit code, or None while it is unknown.

        It is 0 for a rank that the agent ended because another rank failed, also if the rank left no message.
        """
        for kind, code in (("report", 0), ("failure", 1)):
            if info.file(kind).is_file():
                return code
        agent = self._agent_exit_code()
        if not agent:
            return agent  # the agent reports on ranks only when it ends
        if not self._log.is_file():
            return agent
        failed, ended = self._failed()
        if info.rank in ended:
            return 0
        return failed.get(info.rank, 0 if failed or self._any_failure() else agent)

    def _failed(self) -> tuple[dict[int, int], set[int]]:
        """Return the exit codes of the failed ranks in the agent's summary, and the ranks that the agent itself ended.

        The latter died of SIGTERM while other ranks failed otherwise, before they could write their mark.
        """
        text = self._log.read_text(errors="replace") if self._log.is_file() else ""
        found = {int(rank): int(code) for rank, code in _FAILED_RANK.findall(text)}
        terminated = {rank for rank, code in found.items() if code == -signal.SIGTERM}
        ended = terminated if len(terminated) < len(found) or self._any_failure() else set()
        return {rank: code for rank, code in found.items() if rank not in ended}, ended

    def spared(self, info: RankInfo) -> bool:
        """Return whether the rank never began, or was asked to end by the agent.

        The agent asks before it kills, which leaves a mark.
        """
        mark = info.file("asked_to_end")
        return not mark.is_file() or mark.stat().st_size > 0 or info.rank in self._failed()[1]

    @property
    def is_gone(self) -> bool:
        """Whether the agent was killed, or failed before any rank began."""
        code = self._agent_exit_code() or 0
        return self._server.is_gone or code < 0 or (code > 0 and not any(self.pid(info) for info in self._ranks))

    def _any_failure(self) -> bool:
        return any(info.file("failure").is_file() for info in self._ranks)

    def _agent_exit_code(self) -> int | None:
        if self._agent is None:
            return None
        code = self._server.exit_code(self._agent)
        return unseen_exit_code(self._agent) if code is None else code

    def end(self) -> list[int]:
        if self._agent is None:
            return []
        if self._agent_exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._agent, signal.SIGKILL)  # the kernel ends its ranks then
        deadline = time.monotonic() + KILL_SECONDS
        while self._agent_exit_code() is None and time.monotonic() < deadline:
            self._server.listen(0.1)
        _await_cleaners(self._ranks)
        if not self._server.is_gone:
            end_children(self._server.pid)
        _end_started_by(self._ranks)
        for info in self._ranks:  # the agent's log says why a rank did not start
            if not info.file("log").is_file() and self._log.is_file():
                info.file("log").write_bytes(self._log.read_bytes())
        left = [info.rank for info in self._ranks if process_state(self.pid(info) or 0) not in ("", "Z")]
        if left:
            self._server.close()
        return left


LAUNCHERS: dict[str, Callable[[Cluster], Launcher]] = {"forkserver": ForkserverLauncher, "torchrun": TorchrunLauncher}
