"""The process that forks others: what `fork_server` starts, and speaks with."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import NoReturn

from meshmark.launch.folders import FOLDERS, remove_folders
from meshmark.launch.processes import adopt_orphans, die_with_parent, end_own_children

LAUNCHER = "MESHMARK_LAUNCHER"
"""Variable with the launcher's process id, by which all that descends from a server is told."""
STILL_THERE = "still there"
"""Asked and answered."""
READY = "ready"
"""Message of a server whose modules are imported."""
CUDA_STARTED = "CUDA was started"
"""Message of a server one of whose modules started CUDA: CUDA cannot be used in a fork of such a process."""
_END_SECONDS = 10.0
"""How long a killed server may take to end."""
_BETWEEN_SECONDS = 2.0
"""How much later than its server a killed launcher may be seen to end: the kernel ends them in either order."""
LEAVE = "leave"
"""Message with which a launcher ends a server. A launcher that sends none is gone, and has cleaned nothing up."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Fork, and call a function there."""

    pickled: bytes
    """The function and its arguments: for the fork to open, so that the server imports nothing for it."""
    path: list[str]
    """The launcher's `sys.path`; or, in another virtual environment, what of it is in none."""
    keeps: bool
    """Whether the server's own `sys.path` is appended, as in another virtual environment."""
    folder: str
    """And its working directory."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Fork, and serve there, over a socket that follows."""

    environment: Mapping[str, str]
    modules: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Report of a server that a child has ended."""

    pid: int
    exit_code: int
    """Negative: the signal that killed it."""


def execute(command: Sequence[str], environment: Mapping[str, str], log: str) -> NoReturn:
    """For `call`: become `command`, in a session of its own, with its output in `log`."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.execvpe(command[0], list(command), dict(environment))


def main(handle: int) -> NoReturn:
    """A server's process, from its start to its end; its arguments are modules."""
    janitor = _start_janitor(handle)
    die_with_parent(int(os.environ[LAUNCHER]))  # an import can hang
    _serve(Connection(handle), sys.argv[1:], janitor)


def _start_janitor(handle: int) -> int:
    """Fork a process that removes the launcher's folders if the launcher is killed while this server imports.

    The kernel then kills the server too, which cannot clean up. Return the process's number, 0 where there is none.
    """
    if not hasattr(os, "pidfd_open"):
        return 0
    server, launcher = os.getpid(), int(os.environ[LAUNCHER])
    if janitor := os.fork():
        return janitor
    try:
        os.close(handle)  # or the launcher would not see that the server has ended
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        of_server = os.pidfd_open(server)
        with contextlib.suppress(ProcessLookupError):  # which is gone already
            of_launcher = os.pidfd_open(launcher)
            select.select([of_launcher, of_server], [], [])
            if not select.select([of_launcher], [], [], _BETWEEN_SECONDS)[0]:
                return 0  # the server alone has ended, and its launcher cleans up
        select.select([of_server], [], [], _END_SECONDS)
        remove_folders(os.environ[FOLDERS])
    finally:
        os._exit(0)


def _serve(channel: Connection, modules: Sequence[str], janitor: int = 0) -> NoReturn:
    """Import `modules`, say so, and do what the launcher asks for until it is gone."""
    adopt_orphans()
    _import(modules)
    gc.freeze()  # keeps the children's collector from touching, and so copying, every shared page
    die_with_parent(None)  # from here on the server sees by itself that the launcher is gone, and ends its children
    if janitor:
        os.kill(janitor, signal.SIGKILL)
        os.waitpid(janitor, 0)
    told = False
    with contextlib.suppress(EOFError, OSError):
        channel.send(CUDA_STARTED if _has_started_cuda() else READY)
        _obey(channel)
        told = True
    end_own_children()
    if not told:
        remove_folders(os.environ[FOLDERS])
    os._exit(0)


def _obey(channel: Connection) -> None:
    """Until it may leave. Raises `EOFError` or `OSError` when the launcher is gone."""
    with _woken_by_children() as (woken, waker):
        while True:
            ready = wait([channel, woken])
            if woken in ready:
                woken.recv(4096)
                for ended in _ended_children():
                    channel.send(ended)
            if channel in ready:
                order, server = channel.recv(), os.getpid()
                if order == LEAVE:
                    return
                if order == STILL_THERE:
                    channel.send(order)
                    continue
                branch = Connection(recv_handle(channel)) if isinstance(order, Branch) else None
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (channel, woken, waker):
                        end.close()
                    _act(order, branch, server)
                if branch:
                    branch.close()
                channel.send(pid)


@contextlib.contextmanager
def _woken_by_children() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The first can be read from when a child has ended."""
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield woken, waker
    finally:
        signal.set_wakeup_fd(-1)


def _act(order: Call | Branch, branch: Connection | None, server: int) -> NoReturn:
    """Run a fork's task, and never return, whatever is raised, even if its output is a full disk."""
    code = 1
    try:
        die_with_parent(server)
        if isinstance(order, Branch):
            assert branch
            os.environ.update(order.environment)
            _serve(branch, order.modules)
        for ending in (signal.SIGTERM, signal.SIGHUP):  # the server ignores them
            signal.signal(ending, signal.SIG_DFL)
        sys.path[:] = [*order.path, *(place for place in sys.path if order.keeps and place not in order.path)]
        os.chdir(order.folder)
        function, arguments = pickle.loads(order.pickled)
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _ended_children() -> Iterator[Ended]:
    """Those that nobody has seen end yet; also adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield Ended(pid=found[0], exit_code=os.waitstatus_to_exitcode(found[1]))


def _has_started_cuda() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())


def _import(modules: Sequence[str]) -> None:
    """Import modules, and ignore those that fail.

    A failing import is left to the rank that needs the module, where it becomes that case's outcome. What frameworks
    print during imports is discarded for the same reason.
    """
    with _silence():
        for name in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Point this process's output nowhere for a while."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, old in zip((1, 2), kept, strict=True):
            os.dup2(old, stream)
            os.close(old)
        os.close(nowhere)
