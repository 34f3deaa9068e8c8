"""Processes that outlive those who started them: adopted, and ended.

A fork server adopts whatever descends from a rank, in whatever session or group, as soon as its parent is gone (Linux
calls that a subreaper); the launcher ends what it holds after every launch, and the server itself once the launcher is
gone, however that ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_SECONDS = 2.0


def adopt_orphans() -> None:
    """Make this process, a server, the parent of all its descendants' orphans, which it is to end before it ends: when
    the launcher is gone. Until then it heeds no signal that is meant for the launcher."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process when `parent` ends, or now if it has already. None calls it off."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if parent else 0)
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_children(parent: int) -> None:
    """Kill all children of `parent`, and what it adopts meanwhile."""
    deadline = time.monotonic() + _END_SECONDS
    while (children := _children(parent)) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def _children(parent: int) -> list[int]:
    """Living processes whose parent is `parent`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                state, its_parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(its_parent) == parent and state != "Z":
                    found.append(int(folder.name))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
