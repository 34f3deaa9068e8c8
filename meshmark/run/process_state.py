"""What /proc tells of a process, also when its parent does not look."""

from __future__ import annotations

import os
from pathlib import Path

STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "inside the kernel"}
"""Of a process that answers no signal, in words."""
_EXIT_CODE = 49
"""Place in /proc/PID/stat, from the state on."""


def process_state(pid: int) -> str:
    """The kernel's letter; empty when there is no such process, and Z when all that is left of it is its exit code."""
    return fields[0] if (fields := _fields(pid)) else ""


def unseen_exit_code(pid: int) -> int | None:
    """Of a process that has ended, whose parent has not taken notice yet: it may be stopped itself. Negative: the
    signal that killed it."""
    fields = _fields(pid)
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if fields and fields[0] == "Z" else None


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a living process, or what it was forked from, was started with this in its environment."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
