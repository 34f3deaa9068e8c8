"""Enforce the time limit of the ranks of one node, and report how they ended, for every launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import meshmark
from meshmark.launch.cluster import Cluster
from meshmark.launch.folders import is_full
from meshmark.launch.fork_server import LOST_EXIT_CODE
from meshmark.launch.processes import (
    NO_PROCESS,
    NO_PROCESS_ADVICE,
    STATES,
    is_process_limit_reached,
    process_state,
)
from meshmark.launch.rank import STACK_SIGNAL, RankInfo, ask
from meshmark.rank_progress import EXPLAIN_SECONDS, Mark, Pace, Phase, read_mark
from meshmark.records.rank_report import RankFailure, StackState
from meshmark.records.record import Status
from meshmark.records.request import Request, Task
from meshmark.serial import decode
from meshmark.text import LIMIT, clip, clip_tail

_POLL_SECONDS = 0.1
_STACK_SECONDS = 3.0
_FROZEN_SECONDS = 3.0
"""If a wait takes this many seconds too long, this process was stopped, and maybe its ranks too."""
_HALTED = (STATES["T"], STATES["t"])
"""States, in words, of a process that a signal or a debugger has stopped."""
_LOG_LINES = 30
_ENDURE_SECONDS = 10.0
"""Least time in seconds that the pass `FAIL` gives other ranks to end by themselves, which is what it tests."""
_THREADS_OF_RANK = 8
"""Threads that a rank on a CPU starts before its adapter is built, or more."""
_CRASHES = [-number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)]
"""Exit codes of crashes. The watchdog causes none of them: such a rank was already dying when it was killed."""


class RankProcesses(Protocol):
    """The processes of a launch's ranks on this node."""

    grace_seconds: float
    """How long the others may take to fail by themselves after the first failure."""

    def start(self) -> None:
        """Start them all."""

    def wait(self, seconds: float) -> None:
        """Wait until a rank may have ended, but no longer than `seconds`."""

    def pid(self, info: RankInfo) -> int | None:
        """Return the rank's process id, or None if there is none or it is unknown."""

    def exit_code(self, info: RankInfo) -> int | None:
        """Return the rank's exit code, or None while it runs. A negative code is the signal that killed it."""

    def spared(self, info: RankInfo) -> bool:
        """Return whether the rank's end says nothing about it, because another rank's failure was the cause."""

    @property
    def is_gone(self) -> bool:
        """Whether the processes that started the ranks are gone, and with them every rank that had not ended."""

    def end(self) -> list[int]:
        """Kill the ranks that still run, and all processes that ranks started. Returns the ranks that survive."""


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
        """`cluster` is the nodes that run ranks of the same launch, or None if no other node does."""
        self.processes, self.cluster, self.request, self.ranks = processes, cluster, request, ranks
        self.failed_key = failed_key
        self.killed: set[int] = set()
        """Ranks that this watchdog ended: their death says nothing."""
        self.unkillable: list[int] = []
        self.died: dict[int, float] = {}
        """When each rank was seen to have ended."""
        self.started = self.stopped = time.monotonic()
        self.marks: dict[int, Mark] = {}
        """Progress of each rank when its time was up."""
        self.states: dict[int, str] = {}
        """State of each rank's process when its time was up, in words."""
        self.frozen = 0.0
        """Seconds in which this process was stopped. They count for no rank's time limit."""

    def run(self) -> list[RankFailure]:
        """Start the ranks, wait for their end, and return the failures."""
        late: list[int] = []
        try:
            self.processes.start()
            late = self._wait()
            if late:
                self.marks = {info.rank: self._mark(info) for info in self.ranks}
                self.stopped = time.monotonic()
                self._dump_stacks()
                self.states = {p.rank: self._state(p) for p in self.ranks}
        finally:
            self.killed = {info.rank for info in self._alive()}
            self.unkillable = self.processes.end()
        return [self._excused(f) for info in self.ranks if (f := self._failure(info, late))]

    def _excused(self, failure: RankFailure) -> RankFailure:
        """Return the failure, marked as no fault of the adapter if all was stopped for longer than the time limit.

        Ranks that wait for one another give up when they continue after such a stop.
        """
        if self.frozen <= self.request.time_limit_seconds or failure.kind == Status.UNKILLABLE:
            return failure
        told = f"the machine, the container or the job was stopped for {self.frozen:.0f} s; then: {failure.message}"
        return dataclasses.replace(failure, kind=Status.UNFINISHED, message=told)

    def _state(self, info: RankInfo) -> str:
        pid = self.processes.pid(info)
        return STATES.get(process_state(pid), "not stopped, but frozen or starved") if pid else "it never began"

    def _alive(self) -> list[RankInfo]:
        return [info for info in self.ranks if self.processes.exit_code(info) is None]

    def _wait(self) -> list[int]:
        """Wait until all ranks have ended or must be ended. Returns the ranks whose time is up."""
        deadline = self.started + self.request.time_limit_seconds
        last_moment = None
        while self._alive():
            if (lost := self._lost_seconds()) > _FROZEN_SECONDS:
                deadline += lost
                last_moment = last_moment and last_moment + lost
                self.frozen += lost
            self._note_deaths()
            if last_moment is None and self._anyone_failed():
                least = _ENDURE_SECONDS if self.request.task is Task.FAIL else 0.0
                last_moment = time.monotonic() + max(self.processes.grace_seconds, least)
            if last_moment is not None and time.monotonic() > last_moment:
                return []
            past = time.monotonic() - deadline
            if past > EXPLAIN_SECONDS or (past > 0 and not self._explains()):
                return [info.rank for info in self._alive()]
        self._note_deaths()
        self._anyone_failed()
        return []

    def _mark(self, info: RankInfo) -> Mark:
        return read_mark(info.file("progress"), started=self.started)

    def _explains(self) -> bool:
        """Return whether a rank, having trained and found a defect, searches for its name and makes progress."""
        since = time.monotonic() - self.request.time_limit_seconds
        marks = [self._mark(info) for info in self._alive()]
        return any(mark.phase is Phase.EXPLAIN and mark.time > since for mark in marks)

    def _lost_seconds(self) -> float:
        """Wait for the next event, and return the seconds by which the wait took too long.

        That is about zero unless this process was stopped, for example because a container or a job was paused.
        """
        began = time.monotonic()
        self.processes.wait(_POLL_SECONDS)
        return time.monotonic() - began - _POLL_SECONDS

    def _note_deaths(self) -> None:
        for info in self.ranks:
            if self.processes.exit_code(info) is not None:
                self.died.setdefault(info.rank, time.time())

    def _anyone_failed(self) -> bool:
        """Return whether a rank on any node has failed. A failure on this node is announced to the others."""
        here = any(self._failed(info) for info in self.ranks)
        if self.cluster is None:
            return here
        if here:
            self.cluster.announce(self.failed_key)
        return here or self.cluster.happened(self.failed_key)

    def _failed(self, info: RankInfo) -> bool:
        """Return whether the rank ended without a report."""
        exit_code = self.processes.exit_code(info)
        silent = exit_code == 0 and not info.file("report").is_file() and not self.processes.spared(info)
        return bool(exit_code) or silent

    def _dump_stacks(self) -> None:
        """Have every living rank write its stacks, and what it was communicating, and wait until they have."""
        awaited = [info.file("collectives") for info in self._alive() if ask(info)]
        for info in self._alive():
            if (pid := self.processes.pid(info)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        awaited += [info.file("stack") for info in self._alive()]
        while time.monotonic() < deadline and not all(map(_size, awaited)):
            time.sleep(0.05)
        time.sleep(0.1)

    def _failure(self, info: RankInfo, late: list[int]) -> RankFailure | None:
        log_tail = tail(info.file("log"))
        if info.rank in self.unkillable:
            return self._unkillable(info, log_tail)
        if info.rank in late:
            return self._late(info, log_tail)
        if info.file("failure").is_file():
            left: RankFailure = decode(RankFailure, json.loads(_read(info.file("failure"))))
            return dataclasses.replace(left, log_tail=log_tail)
        exit_code = self.processes.exit_code(info) or 0
        if (info.rank in self.killed and exit_code not in _CRASHES) or not self._failed(info):
            return None
        kind, message = _death(exit_code)
        # Without its server, it is unknown whether a rank that has reported ended well.
        if self.processes.is_gone and (exit_code == LOST_EXIT_CODE or not info.file("report").is_file()):
            kind = Status.UNFINISHED
            message = "what starts ranks was killed, was stopped, or failed before they began"
        elif is_full(info.folder):
            kind, message = Status.NO_SPACE, f"{message}, and {str(info.folder.parent)!r} is full"
        elif exit_code == -signal.SIGABRT and self._lacked_process(info, log_tail):
            kind, message = Status.UNFINISHED, message + NO_PROCESS_ADVICE
        return RankFailure(
            rank=info.rank, kind=kind, message=message, time=self.died.get(info.rank, time.time()), log_tail=log_tail
        )

    def _lacked_process(self, info: RankInfo, log_tail: str) -> bool:
        """Return whether a rank probably aborted because it could not start a thread.

        C++ aborts where a thread cannot be started and nobody catches the error. Its words say so in most cases. Before
        the adapter is built, the words of an abort without an exception, under a limit, are enough.
        """
        unbuilt = self._mark(info).phase is Phase.JOIN and "without an active exception" in log_tail
        if not (unbuilt or NO_PROCESS.search(log_tail)):
            return False
        return is_process_limit_reached(ended=_THREADS_OF_RANK * len(self.ranks))

    def _unkillable(self, info: RankInfo, log_tail: str) -> RankFailure:
        pid = self.processes.pid(info) or 0
        state = process_state(pid)
        return RankFailure(
            rank=info.rank,
            kind=Status.UNKILLABLE,
            message=f"process {pid} outlived SIGKILL, {STATES.get(state, 'frozen')} (state {state}): it is left "
            "behind, with the memory and devices that it holds; `dmesg` may say why",
            time=time.time(),
            log_tail=log_tail,
            stack=clip(_read(info.file("stack"))),
        )

    def _late(self, info: RankInfo, log_tail: str) -> RankFailure:
        """Return the failure of a rank that was late: whether it was slow or made no progress after its last mark."""
        limit, mark = self.request.time_limit_seconds, self.marks[info.rank]
        pace, message = mark.pace(now=self.stopped, limit=limit), f"no end within {limit:g} s"
        stack = _read(info.file("stack"))
        stands = stack_state(stack)
        if self.request.device != "cpu" and stands is StackState.OWN:
            stands = StackState.OUTSIDE  # a line of ours may wait there for the framework's kernels
        kind: str = Pace.HUNG if pace is Pace.WAITS and not stack else pace  # without a stack, it answered no signal
        if self.states.get(info.rank) in _HALTED:
            kind = Status.UNFINISHED
            message += ": a signal (SIGSTOP, SIGTSTP) or a debugger had stopped it, which is no fault of the adapter"
        elif stands is StackState.OWN and pace is not Pace.SLOW:
            kind = Status.UNFINISHED
            message += (
                f": {mark.text(now=self.stopped)}; it stands in Meshmark's own code, {place_in_meshmark(stack)}: "
            )
            message += "no fault of the adapter or its framework; please report it"
        elif pace is Pace.SLOW:
            message += f", but still coming on: {mark.text(now=self.stopped)}; --time-limit gives it longer"
        else:
            message += f", and no progress: {mark.text(now=self.stopped)}"
            message += "" if mark.done else "; if that may take so long, --time-limit gives it longer"
        return RankFailure(
            rank=info.rank,
            kind=kind,
            message=message,
            time=time.time() - (time.monotonic() - mark.time),
            log_tail=log_tail,
            stack=(clip(stack) or f"none: the process answered no signal ({self.states.get(info.rank, 'gone')})")
            + _communicated(info),
            stack_state=stands,
        )


def _death(exit_code: int) -> tuple[str, str]:
    """Return the status for an exit code, and a description."""
    if exit_code < 0:
        hint = " (the kernel's out-of-memory killer, if nobody else)" if exit_code == -signal.SIGKILL else ""
        known = -exit_code in {*signal.Signals}  # not real-time signals but the first and the last
        return Status.KILLED, f"killed by {signal.Signals(-exit_code).name if known else f'signal {-exit_code}'}{hint}"
    return Status.EXITED, f"ended with exit code {exit_code} before it could report"


_WAITS = re.compile(r"/torch/(distributed|autograd|futures|_ops\.py|cuda)\b")
"""Where a rank is that waits for others: in a collective, or in a backward pass or a stream that holds one."""


_PACKAGE = Path(meshmark.__file__).parent
_ENGINES = ("adapters", "adapter", "suites")
"""Folders of the package whose code is an engine's, or runs for one."""
_SHARED = ("models", "reference", "algorithms", "spec", "theory")
"""Folders whose code engines and judge both call: the caller decides."""
_LIBRARY = re.compile(r"/(torch|numpy|scipy)/|/lib/python[0-9.]+/(?!site-packages|dist-packages)|^<")


def stack_state(stack: str) -> StackState:
    """Return the state of a rank from its `stack`, as written by faulthandler.

    It depends on the innermost frame of the thread that was asked.
    """
    if not stack:
        return StackState.SILENT
    frames = _frames(stack)
    if not frames:
        return StackState.OUTSIDE
    file, line, _ = frames[0]
    if _WAITS.search(file) or ".wait(" in linecache.getline(file, int(line)):
        return StackState.INSIDE
    return StackState.OWN if place_in_meshmark(stack) else StackState.OUTSIDE


def place_in_meshmark(stack: str) -> str:
    """Where in Meshmark's own code the thread that was asked stands; empty where an engine was at work.

    Frames of libraries that Meshmark's code calls are passed over, from the innermost one outward. The first other one
    decides.
    """
    for file, line, name in _frames(stack):
        path = Path(file)
        if not path.is_relative_to(_PACKAGE):
            if _LIBRARY.search(file):
                continue
            return ""
        folder = path.relative_to(_PACKAGE).parts[0]
        if folder in _SHARED:
            continue
        return "" if folder in _ENGINES else f"{path.relative_to(_PACKAGE.parent)}:{line} in {name}"
    return ""


def _frames(stack: str) -> list[tuple[str, str, str]]:
    """File, line and function, innermost first."""
    return re.findall(r'File "(.*)", line (\d+) in (.*)', stack.rpartition("Current thread")[2])


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


def _communicated(info: RankInfo) -> str:
    text = _read(info.file("collectives"))
    return f"\n\nThe last collective that ended, and those under way:\n{clip(text)}" if text else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
