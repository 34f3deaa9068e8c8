"""The launchers: ranks forked from a server (the default), or started by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshmark.adapter.registry import load_adapter
from meshmark.environment import interpreter_of
from meshmark.errors import InputError
from meshmark.launch.cluster import Cluster
from meshmark.launch.fork_server import ForkServer
from meshmark.launch.launch import Launcher, LaunchResult, caches_freed, launch_with, process_environment
from meshmark.launch.processes import end_children, end_started_with, process_state, unseen_exit_code
from meshmark.launch.rank import run_forked_rank
from meshmark.launch.ranks import RankInfo
from meshmark.launch.server_process import LAUNCHER, execute
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode

# --- The default launcher. It forks ranks from a server that has PyTorch and the case's framework imported.

_ALWAYS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "torch._dynamo",
    "torch._inductor",
    "meshmark.launch.rank",
)
"""Modules of every rank. Of `torch`, the first optimizer imports `_dynamo` and the first profile `_inductor`: left to
ranks, that is half of the time of a small model's."""
_IMPORT_SECONDS = 300.0
"""For PyTorch, on a slow disk; a framework has the case's time limit, if that is longer."""
KILL_SECONDS = 10.0
"""A rank that outlives SIGKILL for longer cannot be killed."""


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
            self._trunks[key] = ForkServer.start(process_environment(self.cluster.spec, task), _ALWAYS, python)
            self._trunks[key].await_ready("torch", seconds=_IMPORT_SECONDS)
        return self._trunks[key]


def _is_gone(server: ForkServer) -> bool:
    """Also one that is stopped: it is ended."""
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
        """Seen without the server too, for that may be stopped."""
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
        for info in self._ranks:
            if (pid := self._pids.get(info.rank)) is not None:
                self._kill(info, pid)
        deadline = time.monotonic() + KILL_SECONDS
        while (left := self._running()) and time.monotonic() < deadline:
            self._server.listen(0.1)
        if left:
            self._server.close()  # whoever comes next gets a server without such children
        elif not self._server.is_gone:
            end_children(self._server.pid)  # what the ranks had started in sessions of its own
        _end_started_by(self._ranks)
        return left

    def _kill(self, info: RankInfo, pid: int) -> None:
        """The rank, and what it had started."""
        if self.exit_code(info) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif not self.is_gone and process_state(pid) not in ("", "Z"):
            return  # it ended so long ago that its number is somebody else's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _running(self) -> list[int]:
        return [info.rank for info in self._ranks if self.pid(info) and self.exit_code(info) is None]


def _end_started_by(ranks: Sequence[RankInfo]) -> None:
    """End what the ranks of a launch had started and their server did not adopt, for example because it was killed.

    It inherits TMPDIR, which is the launch's own folder.
    """
    end_started_with("TMPDIR", str(ranks[0].folder))


# --- A launcher that runs one plain torchrun command a launch. It is slow, and it is how most training is started.

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
    """The ranks of one launch, known by what they leave in its folder, and the agent that started them."""

    grace_seconds = 40.0
    """The agent ends the others, within 30 s, and then tells which of them was killed."""

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
        """The agent meets with itself in a file: `--standalone` would open a port, and what it reads there it
        unpickles."""
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
        """None before the rank has come to itself."""
        file = info.file("pid")
        text = file.read_text() if file.is_file() else ""
        return int(text) if text else None

    def exit_code(self, info: RankInfo) -> int | None:
        """0 also of a rank that the agent ended for the sake of another, or that ended so without a word."""
        for kind, code in (("report", 0), ("failure", 1)):
            if info.file(kind).is_file():
                return code
        agent = self._agent_exit_code()
        if not agent:
            return agent  # nothing is said of a rank before the agent's end
        if not self._log.is_file():
            return agent
        failed, ended = self._failed()
        if info.rank in ended:
            return 0
        return failed.get(info.rank, 0 if failed or self._any_failure() else agent)

    def _failed(self) -> tuple[dict[int, int], set[int]]:
        """Exit codes of the ranks that failed, by the agent's summary; and those that fell to SIGTERM beside others,
        which did not: the agent ended them before they could leave a mark of that."""
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
        if not self._server.is_gone:
            end_children(self._server.pid)
        _end_started_by(self._ranks)
        for info in self._ranks:  # what kept a rank from beginning stands in the agent's log
            if not info.file("log").is_file() and self._log.is_file():
                info.file("log").write_bytes(self._log.read_bytes())
        left = [info.rank for info in self._ranks if process_state(self.pid(info) or 0) not in ("", "Z")]
        if left:
            self._server.close()
        return left


LAUNCHERS: dict[str, Callable[[Cluster], Launcher]] = {"forkserver": ForkserverLauncher, "torchrun": TorchrunLauncher}
