"""Holds the ranks of one node to their time limit, and tells how they ended, however their processes were started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from meshmark.clip import LIMIT, clip, clip_tail
from meshmark.rank_progress import Mark, Pace, read_mark
from meshmark.run.cluster import Cluster
from meshmark.run.rank_info import RankInfo
from meshmark.run.rank_report import RankFailure
from meshmark.run.request import Request, Task
from meshmark.run.worker import STACK_SIGNAL
from meshmark.serial import decode

_POLL_SECONDS = 0.1
_LOG_LINES = 30
_NO_STACK = "none: the process answered no signal (stopped, or inside the kernel)"
_ENDURE_SECONDS = 10.0
"""What FAIL, which is to see whether the others end by themselves, gives them at least."""


class RankProcesses(Protocol):
    """The processes of a launch's ranks on this node."""

    grace_seconds: float
    """How long the others may take to fail by themselves after the first failure."""

    def start(self) -> None:
        """Start them all."""

    def wait(self, seconds: float) -> None:
        """Until something may have happened to one, but no longer than `seconds`."""

    def pid(self, info: RankInfo) -> int | None:
        """None while it has none, or where that is not known."""

    def exit_code(self, info: RankInfo) -> int | None:
        """Negative: the signal that killed it. None while it runs."""

    def end(self) -> None:
        """Kill what still runs, and whatever any of them started."""


class Watchdog:
    """Watches the ranks of one launch on one node."""

    def __init__(
        self,
        processes: RankProcesses,
        cluster: Cluster | None,
        request: Request,
        ranks: Sequence[RankInfo],
        failed_key: str,
    ) -> None:
        """`cluster`: where other nodes run ranks of the same launch; None when none does."""
        self.processes, self.cluster, self.request, self.ranks = processes, cluster, request, ranks
        self.failed_key = failed_key
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
            self.processes.start()
            late = self._wait()
            if late:
                self.marks = {p.rank: read_mark(p.file("progress"), started=self.started) for p in self.ranks}
                self.stopped = time.monotonic()
                self._dump_stacks()
        finally:
            self.killed = {info.rank for info in self._alive()}
            self.processes.end()
        return [f for info in self.ranks if (f := self._failure(info, late))]

    def _alive(self) -> list[RankInfo]:
        return [info for info in self.ranks if self.processes.exit_code(info) is None]

    def _wait(self) -> list[int]:
        """Until all have ended, or none may go on. Returns the ranks whose time is up."""
        deadline = self.started + self.request.time_limit_seconds
        last_moment = None
        while self._alive():
            self.processes.wait(_POLL_SECONDS)
            self._note_deaths()
            if last_moment is None and self._anyone_failed():
                least = _ENDURE_SECONDS if self.request.task is Task.FAIL else 0.0
                last_moment = time.monotonic() + max(self.processes.grace_seconds, least)
            if last_moment is not None and time.monotonic() > last_moment:
                return []
            if time.monotonic() > deadline:
                return [info.rank for info in self._alive()]
        self._note_deaths()
        self._anyone_failed()
        return []

    def _note_deaths(self) -> None:
        for info in self.ranks:
            if self.processes.exit_code(info) is not None:
                self.died.setdefault(info.rank, time.time())

    def _anyone_failed(self) -> bool:
        """Whether a rank on any node has failed; if one did here, the other nodes are told."""
        here = any(self._fell(info) for info in self.ranks)
        if self.cluster is None:
            return here
        if here:
            self.cluster.announce(self.failed_key)
        return here or self.cluster.happened(self.failed_key)

    def _fell(self, info: RankInfo) -> bool:
        """Whether it has ended without a report, be it with exit code 0, or otherwise than well."""
        exit_code = self.processes.exit_code(info)
        return exit_code is not None and bool(exit_code or not info.file("report").is_file())

    def _dump_stacks(self) -> None:
        """Have every living rank write its stacks, and wait until they have."""
        for info in self._alive():
            if (pid := self.processes.pid(info)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(_size(p.file("stack")) for p in self.ranks):
            time.sleep(0.05)
        time.sleep(0.1)

    def _failure(self, info: RankInfo, late: list[int]) -> RankFailure | None:
        log_tail = tail(info.file("log"))
        if info.rank in late:
            return self._late(info, log_tail)
        if info.file("failure").is_file():
            left: RankFailure = decode(RankFailure, json.loads(_read(info.file("failure"))))
            return dataclasses.replace(left, log_tail=log_tail)
        exit_code = self.processes.exit_code(info)
        if exit_code is not None and self._fell(info) and info.rank not in self.killed:
            return RankFailure(
                rank=info.rank,
                kind="killed" if exit_code < 0 else "raised",
                message=_death(exit_code),
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
            stack=clip(_read(info.file("stack"))) or _NO_STACK,
        )


def _death(exit_code: int) -> str:
    if exit_code < 0:
        hint = " (the kernel's out-of-memory killer, if nobody else)" if exit_code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-exit_code).name}{hint}"
    return f"ended with exit code {exit_code} before it could report"


def tail(log: Path) -> str:
    """The last lines, of a log that may be larger than memory."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, _size(log) - 4 * LIMIT))  # a character takes four bytes at most
        text = file.read(4 * LIMIT).decode(errors="replace")
    return clip_tail("\n".join(text.splitlines()[-_LOG_LINES:]))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
