"""Runs a request in fresh processes, one a rank, and brings home whatever they leave.

Ranks are forked from a server that has PyTorch and the frameworks imported: a launch costs tenths of a second, and no
framework's global state outlives its case. This is torch elastic's model (forkserver, agent store, error files, logs
by rank) without its agent: restarts mean nothing to a measurement, and the agent's join ends the survivors
before their stacks can be read, replaces the handler of Ctrl-C, and waits for ever for a stopped process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import meshmark
from meshmark.errors import ClusterError
from meshmark.rank_progress import Mark, Pace, read_mark
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.orphans import end_children
from meshmark.run.rank_report import RankFailure, RankReport
from meshmark.run.request import Request
from meshmark.run.worker import STACK_SIGNAL, RankInfo, run_rank
from meshmark.serial import decode, encode

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0
"""How long the others may take to fail by themselves after the first failure."""
_LOG_LINES = 30
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


class Launcher:
    """Launches requests over a cluster, one after the other."""

    def __init__(self, cluster: Cluster, preload: list[str]) -> None:
        """`preload`: modules of the frameworks that will be needed."""
        self.cluster = cluster
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        root = str(Path(meshmark.__file__).parent.parent)  # the server imports the checkout wherever it was started
        path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ.update(
            PYTHONPATH=os.pathsep.join(dict.fromkeys(path)),
            MESHMARK_PRELOAD=",".join(preload),
            MESHMARK_LAUNCHER=str(os.getpid()),
            KINETO_LOG_LEVEL="9",
            PYTORCH_NVML_BASED_CUDA_CHECK="1",  # is_available() must not touch CUDA in the process that forks
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", "meshmark.run.preload"])

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        """Run `request` on `world_size` ranks, an equal number a node; or, `alone`, all of them on this node, whatever
        the others do.

        Raises `ClusterError` when another node is lost; whatever happens to a rank is in the result.
        """
        spec = ClusterSpec() if alone else self.cluster.spec
        others = None if spec.nnodes == 1 else self.cluster
        prefix = self.cluster.new_prefix() if others else "alone"
        started = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="meshmark-"))
        try:
            ranks = self._ranks(spec, world_size, prefix, folder)
            watchdog = _Watchdog(self._context, others, request, ranks, f"{prefix}/failed")
            failures = watchdog.run()
            reports = [_read_report(info) for info in ranks]
            local = {"reports": encode([r for r in reports if r]), "failures": encode(failures)}
            everyone = [local] if spec.nnodes == 1 else self._exchange(prefix, local, request)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return LaunchResult(
            reports=sorted((decode(RankReport, r) for node in everyone for r in node["reports"]), key=lambda r: r.rank),
            failures=_settle([decode(RankFailure, f) for node in everyone for f in node["failures"]]),
            seconds=time.monotonic() - started,
        )

    def _ranks(self, spec: ClusterSpec, world_size: int, prefix: str, folder: Path) -> list[RankInfo]:
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

    def _exchange(self, prefix: str, local: dict[str, Any], request: Request) -> list[dict[str, Any]]:
        """What every node's ranks left; also holds the nodes to the same request."""
        mine = {**local, "request": f"{request.task} {request.case.id}"}
        texts = self.cluster.exchange(
            f"{prefix}/landing", json.dumps(mine), seconds=request.time_limit_seconds + _ANSWER_SECONDS
        )
        everyone = [json.loads(text) for text in texts]
        if len({node["request"] for node in everyone}) > 1:
            raise ClusterError(
                f"the nodes run different cases: {[node['request'] for node in everyone]}; give each the same command"
            )
        return everyone


class _Watchdog:
    """Holds the ranks of one node to their time limit, and sees how they end."""

    def __init__(
        self,
        context: ForkServerContext,
        cluster: Cluster | None,
        request: Request,
        ranks: list[RankInfo],
        failed_key: str,
    ) -> None:
        """`cluster`: where other nodes run ranks of the same launch; None when none does."""
        self.cluster, self.request, self.ranks, self.failed_key = cluster, request, ranks, failed_key
        self.processes = [
            context.Process(target=run_rank, args=(request, info), name=f"meshmark-rank{info.rank}") for info in ranks
        ]
        self.killed: set[int] = set()
        """Ranks that this watchdog ended: their death says nothing."""
        self.died: dict[int, float] = {}
        """When each rank was seen to have ended."""
        self.started = self.stopped = time.monotonic()
        self.marks: dict[int, Mark] = {}
        """How far each rank had come when its time was up."""

    def run(self) -> list[RankFailure]:
        """Start the ranks, wait for their end, and tell why those failed that did."""
        late: list[int] = []
        try:
            for process in self.processes:
                process.start()
            late = self._wait()
            if late:
                self.marks = {p.rank: read_mark(p.file("progress"), started=self.started) for p in self.ranks}
                self.stopped = time.monotonic()
                self._dump_stacks()
        finally:
            self._kill()
        return [f for info in self.ranks if (f := self._failure(info, late))]

    def _wait(self) -> list[int]:
        """Until all have ended, or none may go on. Returns the ranks whose time is up."""
        deadline = self.started + self.request.time_limit_seconds
        last_moment = None
        while alive := [p for p in self.processes if p.exitcode is None]:
            wait([p.sentinel for p in alive], timeout=_POLL_SECONDS)
            self._note_deaths()
            if last_moment is None and self._anyone_failed():
                last_moment = time.monotonic() + _GRACE_SECONDS
            if last_moment is not None and time.monotonic() > last_moment:
                return []
            if time.monotonic() > deadline:
                return [info.rank for info, p in zip(self.ranks, self.processes, strict=True) if p.exitcode is None]
        self._note_deaths()
        self._anyone_failed()
        return []

    def _note_deaths(self) -> None:
        for info, process in zip(self.ranks, self.processes, strict=True):
            if process.exitcode is not None:
                self.died.setdefault(info.rank, time.time())

    def _anyone_failed(self) -> bool:
        """Whether a rank on any node has failed; if one did here, the other nodes are told."""
        here = any(p.exitcode for p in self.processes)
        if self.cluster is None:
            return here
        if here:
            self.cluster.announce(self.failed_key)
        return here or self.cluster.happened(self.failed_key)

    def _dump_stacks(self) -> None:
        """Have every living rank write its stacks, and wait until they have."""
        for process in self.processes:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, STACK_SIGNAL)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(_size(p.file("stack")) for p in self.ranks):
            time.sleep(0.05)
        time.sleep(0.1)

    def _kill(self) -> None:
        for info, process in zip(self.ranks, self.processes, strict=True):
            if process.pid is None:
                continue
            if process.exitcode is None:
                self.killed.add(info.rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what the rank itself had started
            process.join()
        if server := forkserver._forkserver._forkserver_pid:  # type: ignore[attr-defined]
            end_children(server)  # what the ranks had started in sessions of its own

    def _failure(self, info: RankInfo, late: list[int]) -> RankFailure | None:
        process = self.processes[self.ranks.index(info)]
        log_tail = "\n".join(_read(info.file("log")).splitlines()[-_LOG_LINES:])
        if info.rank in late:
            return self._late(info, log_tail)
        if info.file("failure").is_file():
            left: RankFailure = decode(RankFailure, json.loads(_read(info.file("failure"))))
            return dataclasses.replace(left, log_tail=log_tail)
        if process.exitcode and info.rank not in self.killed:
            return RankFailure(
                rank=info.rank,
                kind="killed" if process.exitcode < 0 else "raised",
                message=_death(process.exitcode),
                time=self.died[info.rank],
                log_tail=log_tail,
            )
        return None

    def _late(self, info: RankInfo, log_tail: str) -> RankFailure:
        """Whether it was slow or stood still, after the mark that it left."""
        limit, mark = self.request.time_limit_seconds, self.marks[info.rank]
        pace, message = mark.pace(now=self.stopped, limit=limit), f"no end within {limit:g} s"
        if pace is Pace.SLOW:
            message += f", but still coming on: {mark.text(now=self.stopped)}; --time-limit gives it longer"
        else:
            message += f", and no progress: {mark.text(now=self.stopped)}"
            message += "" if mark.done else "; if that may take so long, --time-limit gives it longer"
        return RankFailure(
            rank=info.rank,
            kind=pace,
            message=message,
            time=time.time() - (time.monotonic() - mark.time),
            log_tail=log_tail,
            stack=_read(info.file("stack")) or "none: the process answered no signal (stopped, or inside the kernel)",
        )


def _death(exitcode: int) -> str:
    if exitcode < 0:
        hint = " (the kernel's out-of-memory killer, if nobody else)" if exitcode == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-exitcode).name}{hint}"
    return f"ended with exit code {exitcode} before it could report"


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


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _read_report(info: RankInfo) -> RankReport | None:
    text = _read(info.file("report"))
    report: RankReport | None = decode(RankReport, json.loads(text)) if text else None
    return report


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
