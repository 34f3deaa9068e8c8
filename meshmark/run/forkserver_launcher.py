"""The default launcher: ranks forked from a server that has PyTorch and the case's framework imported."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from meshmark.adapter.registry import load_adapter
from meshmark.run.cluster import Cluster
from meshmark.run.fork_server import ForkServer
from meshmark.run.launch import LaunchResult, caches_freed, launch_with, process_environment
from meshmark.run.orphans import end_children
from meshmark.run.process_state import process_state, unseen_exit_code
from meshmark.run.rank_info import RankInfo
from meshmark.run.request import Request, Task
from meshmark.run.worker import run_forked_rank

_ALWAYS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "torch._dynamo",
    "torch._inductor",
    "meshmark.run.worker",
)
"""Modules of every rank. Of `torch`, the first optimizer imports `_dynamo` and the first profile `_inductor`: left to
ranks, that is half of the time of a small model's."""
_IMPORT_SECONDS = 300.0
"""For PyTorch, on a slow disk; a framework has the case's time limit, if that is longer."""
KILL_SECONDS = 10.0
"""A rank that outlives SIGKILL for longer cannot be killed."""


class ForkserverLauncher:
    """One server a set of frameworks and their variables, branched off one that has PyTorch."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._trunks: dict[bool, ForkServer] = {}
        """By whether they cache freed memory, which the C library reads when a process starts. They fork no ranks."""
        self._servers: dict[tuple[bool, tuple[str, ...], tuple[tuple[str, str], ...]], ForkServer] = {}
        """By trunk, modules and environment, started when they are first needed."""

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
        key = caches_freed(request.task), tuple(modules), tuple(sorted(environment.items()))
        if key not in self._servers or _is_lost(self._servers[key]):
            self._servers[key] = self._root(request.task).branch(environment, modules)
            limit = max(_IMPORT_SECONDS, request.time_limit_seconds)
            self._servers[key].await_ready(", ".join(modules) or "nothing", seconds=limit)
        return self._servers[key]

    def _root(self, task: Task) -> ForkServer:
        caches = caches_freed(task)
        if caches in self._trunks and _is_lost(self._trunks[caches]):
            self.close()
        if caches not in self._trunks:
            self._trunks[caches] = ForkServer.start(process_environment(self.cluster.spec, task), _ALWAYS)
            self._trunks[caches].await_ready("torch", seconds=_IMPORT_SECONDS)
        return self._trunks[caches]


def _is_lost(server: ForkServer) -> bool:
    """Also one that is stopped: it is ended."""
    return server.lost or not server.serves()


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
    def lost(self) -> bool:
        return self._server.lost

    def end(self) -> list[int]:
        for info in self._ranks:
            if (pid := self._pids.get(info.rank)) is not None:
                self._kill(info, pid)
        deadline = time.monotonic() + KILL_SECONDS
        while (left := self._running()) and time.monotonic() < deadline:
            self._server.listen(0.1)
        if left:
            self._server.close()  # whoever comes next gets a server without such children
        elif not self._server.lost:
            end_children(self._server.pid)  # what the ranks had started in sessions of its own
        return left

    def _kill(self, info: RankInfo, pid: int) -> None:
        """The rank, and what it had started."""
        if self.exit_code(info) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif not self.lost and process_state(pid) not in ("", "Z"):
            return  # it ended so long ago that its number is somebody else's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _running(self) -> list[int]:
        return [info.rank for info in self._ranks if self.pid(info) and self.exit_code(info) is None]
