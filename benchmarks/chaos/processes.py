"""Processes of one session, as the kernel knows them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark.launch.processes import process_state

MARK = "MESHMARK_CHAOS"
"""Environment variable with the session's name. Every process that descends from the session inherits it."""
CHILD = "MESHMARK_CHAOS_CHILD"
"""Environment variable with the case's name, in processes that a rank has started."""
_ENDED = ("", "Z", "X")
"""States of processes that have ended: gone, or not yet noticed by their parent."""
_LOG = re.compile(r"(.*/meshmark-[^/]+)/log-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A living rank."""

    pid: int
    rank: int
    folder: Path
    """Folder of the process's launch."""

    @property
    def reported(self) -> bool:
        """Whether its work is done: what strikes it now comes too late."""
        return (self.folder / f"report-{self.rank}").exists() or not alive(self.pid)


def alive(pid: int) -> bool:
    return process_state(pid) not in _ENDED


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    found = list[int]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


def ranks_of(pid: int) -> list[Rank]:
    """Ranks among the descendants of `pid`, told by the logs that they write to."""
    found = []
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            if match := _LOG.fullmatch(os.readlink(f"/proc/{process}/fd/1")):
                found.append(Rank(pid=process, rank=int(match[2]), folder=Path(match[1])))
    return [rank for rank in found if alive(rank.pid)]


def marked(mark: str, child: str | None = None) -> list[int]:
    """Return all living processes that have inherited `mark`; with `child`, those that ranks of this case started."""
    wanted = {f"{MARK}={mark}".encode()} | ({f"{CHILD}={child}".encode()} if child else set())
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")) and alive(int(folder.name)):
                    found.append(int(folder.name))
    return found


def servers_of(pid: int) -> list[int]:
    """Return the processes that fork ranks, among the descendants of `pid`; the innermost one comes last."""
    return [process for process in descendants(pid) if b"meshmark.launch.fork_server" in _command(process)]


def describe(pid: int) -> str:
    """Return a process's number, state, parent and command, for a complaint."""
    try:
        state, above = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        waits = Path(f"/proc/{pid}/wchan").read_text()
        output = os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return f"{pid}, gone by now"
    words = _command(pid).replace(b"\0", b" ").decode(errors="replace")
    return (
        f"{pid} in state {state}, waits in {waits}, writes to {output}, child of {above} "
        f"({_command(int(above))[:100]!r}): {words[:200]}"
    )


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def hold(ranks: Sequence[Rank]) -> bool:
    """Stop ranks. If one has reported by then, let all go on and return False.

    What is done to stopped ranks cannot come too late. Without that, a rank may report between a look at it and a
    signal, above all on a busy machine.
    """
    for rank in ranks:
        send(rank.pid, signal.SIGSTOP)
    while any(process_state(rank.pid) not in ("T", "t", *_ENDED) for rank in ranks):
        time.sleep(0.001)
    if any(rank.reported for rank in ranks):
        for rank in ranks:
            send(rank.pid, signal.SIGCONT)
        return False
    return True


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
