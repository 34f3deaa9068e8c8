"""The state of processes, and the end of those that outlive their parents."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

# --- The end of this process.

EXIT_SECONDS = 5.0
"""Most seconds for functions that are registered with `atexit`."""


def leave(code: int) -> NoReturn:
    """End this process after the functions that it or a library has registered with `atexit`.

    They remove temporary folders and shared memory. Threads and process groups of a script or an adapter may never end,
    so that the functions are not waited for long, and threads not at all.
    """
    limit = threading.Timer(EXIT_SECONDS, os._exit, [code])
    limit.daemon = True
    with contextlib.suppress(BaseException):
        limit.start()
        atexit._run_exitfuncs()
    os._exit(code)


def forget_exit_functions() -> None:
    """Forget functions that were registered with `atexit` before this process was forked: they are its parent's.

    That of `multiprocessing` knows to which process what it removes belongs.
    """
    atexit._clear()
    if (module := sys.modules.get("multiprocessing.util")) is not None:
        atexit.register(module._exit_function)


# --- The state of a process, read from /proc because its parent may not look.

STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "inside the kernel"}
"""Descriptions of the states of a process that answers no signal."""
_EXIT_CODE = 49
"""Place in /proc/PID/stat, from the state on."""


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state. Empty if there is none, Z if only its exit code is left."""
    return fields[0] if (fields := _fields(pid)) else ""


def unseen_exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended but whose parent has not noticed yet, else None.

    The parent may itself be stopped. A negative code is the signal that killed the process.
    """
    fields = _fields(pid)
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if fields and fields[0] == "Z" else None


def has_variable(pid: int, name: str, value: str) -> bool:
    """Return whether a living process, or the one it was forked from, was started with this variable in its
    environment.
    """
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


NO_PROCESS = re.compile(r"can't start new thread|Resource temporarily unavailable")
"""Messages of calls that could not start a process or a thread."""
NO_PROCESS_ADVICE = "; `ulimit -u` or a control group (docker's --pids-limit) allows no more processes: raise it"


def is_process_limit_reached(ended: int = 0) -> bool:
    """Return whether this user has nearly as many processes and threads as `ulimit -u` allows, or whether a control
    group of this process, as of a container, has refused one.

    Nearly, because some may have ended since one could not be started. `ended` is the number of those that are known
    to have ended.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limited = most != resource.RLIM_INFINITY and _num_threads(os.getuid()) + ended >= 0.8 * most
    return limited or any(_refusals(folder) for folder in _control_groups())


def _control_groups(mounted: Path = Path("/sys/fs/cgroup"), listed: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Yield the folders of this process's control groups that limit processes, and of those around them."""
    with contextlib.suppress(OSError):
        for line in listed.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "pids" not in controllers.split(","):
                continue
            root = mounted / "pids" if controllers else mounted
            # Within a container its own group may be mounted as the root, under another path than is listed.
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                if folder.is_relative_to(root):
                    yield folder


def _refusals(group: Path) -> int:
    """Return how many processes or threads a control group has refused."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in (group / "pids.events").read_text().splitlines())
        return int(counts.get("max", 0))
    return 0


def _num_threads(user: int) -> int:
    """Return the number of threads of all processes of `user`."""
    count = 0
    for folder in _processes():
        with contextlib.suppress(OSError):  # it has just ended
            if folder.stat().st_uid == user:
                count += sum(1 for _ in (folder / "task").iterdir())
    return count


def _processes() -> list[Path]:
    """Return the folders of all processes in /proc."""
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


# --- Orphans: processes that outlive those who started them are adopted and ended.

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_SECONDS = 2.0
_REAP_SECONDS = 10.0
"""How long a killed process may take to end on a busy machine."""
_NUM_THREADS = 17
"""Place in /proc/PID/stat, from the state on."""


def adopt_orphans() -> None:
    """Make this process, a server, the parent of its descendants' orphans, and ignore SIGTERM and SIGHUP.

    These signals are meant for the launcher. When the launcher is gone, the server must end the orphans before itself.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process when `parent` ends, or now if it has already. None calls it off."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if parent else 0)
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_own_children() -> None:
    """Kill all children of this process and what it adopts meanwhile, and reap them.

    A process whose main thread has ended looks like a zombie while its other threads run, and keeps its children
    meanwhile. Only the kernel's report that no child is left proves that none will be adopted any more.
    """
    deadline = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < deadline:
        _kill(_children(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def end_children(parent: int) -> None:
    """Kill all children of `parent`, and what it adopts meanwhile."""
    _end_all(lambda: _children(parent))


_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Processes that remove the shared memory of another one once that has ended."""


def await_cleaners(name: str, value: str, seconds: float = _END_SECONDS) -> None:
    """Wait until no process that removes others' shared memory, and was started with this variable, is left."""

    def is_cleaner(pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return any(cleaner in command for cleaner in _CLEANERS) and has_variable(pid, name, value)

    deadline = time.monotonic() + seconds
    while any(map(is_cleaner, _others())) and time.monotonic() < deadline:
        time.sleep(0.02)


def end_started_with(name: str, value: str) -> int:
    """Kill all processes that were started with this variable in their environment, whoever has adopted them.

    Returns the number of processes.
    """
    return _end_all(lambda: [pid for pid in _others() if has_variable(pid, name, value)])


def _end_all(found: Callable[[], list[int]]) -> int:
    """Kill what `found` returns until it returns nothing, for a short while. Returns the number of processes."""
    deadline, ended = time.monotonic() + _END_SECONDS, set[int]()
    while pids := found():
        ended.update(pids)
        _kill(pids)
        if time.monotonic() > deadline:  # after a look: it takes seconds where thousands of processes run
            break
        time.sleep(0.01)
    return len(ended)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _others() -> list[int]:
    """Return the numbers of all processes except this one."""
    return [pid for folder in _processes() if (pid := int(folder.name)) != os.getpid()]


def _children(parent: int) -> list[int]:
    """Return processes whose parent is `parent`, and of which a thread still lives."""
    found = []
    for folder in _processes():
        with contextlib.suppress(OSError):  # it has just ended
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            has_ended = fields[0] == "Z" and int(fields[_NUM_THREADS]) <= 1
            if int(fields[1]) == parent and not has_ended:
                found.append(int(folder.name))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
