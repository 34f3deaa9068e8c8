"""A process that forks others: the launcher's side (`ForkServer`), and the server itself (`main`).

A server imports its modules once, and every process that it forks has them. It may also branch into another server,
which imports more modules under its own environment. PyTorch is therefore imported once per run, and a framework once
and only if a case needs it. What a framework changes at import, in PyTorch or in the process, affects no other
framework.

Launcher and server communicate through a pair of connected, unnamed sockets. When the launcher's end is closed, for
whatever reason, the server ends its children and itself. (Python's own forkserver is not used. A process can have only
one, it inherits the environment of the process that starts it, and it listens at an address.)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import NoReturn, TypeVar

from meshmark.errors import MeshmarkError
from meshmark.launch.folders import FOLDERS, folder_prefix, remove_folders
from meshmark.launch.processes import (
    NO_PROCESS_ADVICE,
    adopt_orphans,
    die_with_parent,
    end_own_children,
    has_variable,
    is_process_limit_reached,
    process_state,
)

# --- Messages between the launcher and its server.

LAUNCHER = "MESHMARK_LAUNCHER"
"""Variable with the launcher's process id. It identifies all descendants of a server."""
STILL_THERE = "still there"
"""Message that checks whether a server responds, and its reply."""
READY = "ready"
"""Message of a server whose modules are imported."""
CUDA_STARTED = "CUDA was started"
"""Message of a server one of whose modules started CUDA: CUDA cannot be used in a fork of such a process."""

# --- The server and, from `ForkServer` on, the launcher's side.

_END_SECONDS = 10.0
"""How long a killed server may take to end."""
_BETWEEN_SECONDS = 2.0
"""Most seconds between the ends of a server and of its killed launcher. The kernel ends them in either order."""
LEAVE = "leave"
"""Message with which a launcher ends a server. A launcher that ends without it has not removed its folders."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Fork, and call a function there."""

    pickled: bytes
    """The function and its arguments. The fork unpickles them, so that the server need not import their modules."""
    path: list[str]
    """The launcher's `sys.path`. For another virtual environment, without the launcher's installed packages."""
    keeps: bool
    """True if the server's own `sys.path` is appended, as for another virtual environment."""
    folder: str
    """The launcher's working directory."""


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
    """Replace this process by `command`, in a new session, with its output in `log`. To be run by `ForkServer.call`."""
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
    """Execute the launcher's orders until `LEAVE`. Raises `EOFError` or `OSError` when the launcher is gone."""
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
    """Yield two connected sockets. The first becomes readable when a child has ended."""
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
    """Yield the ended children, adopted ones included, whose end was not yet seen."""
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


_Kind = TypeVar("_Kind")

LOST_EXIT_CODE = 255
"""Exit code of a process whose server is gone, so that nobody saw how it ended."""
_ANSWER_SECONDS = 30
"""Time in seconds for a server to fork or to reply, on a machine that swaps."""
_STOPPED_SECONDS = 5.0
"""Time in seconds for which a server may be stopped (SIGSTOP) before a wait for its reply is given up."""
_GONE = "the process that ranks are forked from has ended"
_SILENT = "the process that ranks are forked from does not answer, and was ended; the next case gets a new one"


def _gone() -> str:
    """Return why nothing can be forked any more, as far as it is known."""
    return _GONE + (NO_PROCESS_ADVICE if is_process_limit_reached() else ": killed, for want of memory?")


def is_installed(place: str) -> bool:
    """Return whether an entry of `sys.path` belongs to this interpreter rather than to a project."""
    return place.startswith((sys.prefix, sys.base_prefix))


class ForkServer:
    """The launcher's end of a server."""

    def __init__(
        self, channel: Connection, pid: int, process: subprocess.Popen[bytes] | None, python: str = sys.executable
    ) -> None:
        """`process` is the server's process if it is a child of this one. `python` is the server's interpreter."""
        self.pid, self.is_gone, self._python = pid, False, python
        self._channel, self._exit_codes = channel, dict[int, int]()
        with socket.socket(fileno=os.dup(channel.fileno())) as end:  # a stopped server reads nothing
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _ANSWER_SECONDS, 0))
        self._finalizer = weakref.finalize(self, _close, channel, process)

    @classmethod
    def start(cls, environment: Mapping[str, str], modules: Sequence[str], python: str = sys.executable) -> ForkServer:
        """Start a server with exactly `environment`. It is not yet ready, and ends with this process."""
        channel, its_end = Pipe()
        # Without the working directory, which `-c` puts first: it may be a stranger's.
        path = "import sys; sys.path[:] = filter(None, sys.path)"
        code = f"{path}; from meshmark.launch.fork_server import main; main({its_end.fileno()})"
        process = subprocess.Popen(
            [python, "-c", code, *modules],
            env={**environment, LAUNCHER: str(os.getpid()), FOLDERS: f"{tempfile.gettempdir()}/{folder_prefix()}"},
            stdin=subprocess.DEVNULL,
            pass_fds=[its_end.fileno()],
            start_new_session=True,  # Ctrl-C is the launcher's
        )
        its_end.close()
        return cls(channel, process.pid, process, python)

    def branch(self, environment: Mapping[str, str], modules: Sequence[str]) -> ForkServer:
        """Fork a server from this one, with further variables and modules. It is not yet ready."""
        channel, its_end = Pipe()
        with its_end:
            self._send(Branch(environment=environment, modules=modules))
            with contextlib.suppress(OSError):  # then there is no answer either
                send_handle(self._channel, its_end.fileno(), self.pid)
        return ForkServer(channel, self._answer_pid(), None, self._python)

    def await_ready(self, what: str, *, seconds: float) -> None:
        """Wait until the server's modules are imported. Otherwise, end the server and raise `MeshmarkError`."""
        if self._speaks(seconds):
            message = f"importing {what} ended the process that ranks are forked from"
            with contextlib.suppress(EOFError, OSError):
                if self._channel.recv() != CUDA_STARTED:
                    return
                message = (
                    f"importing {what} started CUDA in the process that ranks are forked from, where it cannot be used "
                    "then; --launcher torchrun starts every rank afresh"
                )
        elif process_state(self.pid) == "T":
            message = f"the process that ranks are forked from was stopped while it imported {what}"
        else:
            message = f"importing {what} took longer than {seconds:g} s; --time-limit gives it longer"
        self.kill()
        raise MeshmarkError(message)

    def call(self, function: Callable[..., object], *arguments: object) -> int:
        """Call `function` in a new process, and return the process id. The process exits with 0 unless it raises.

        Raises `MeshmarkError` if the server is gone or does not reply. A server that does not reply is ended.
        """
        keeps = self._python != sys.executable
        path = [place for place in sys.path if not (keeps and is_installed(place))]
        self._send(Call(pickled=pickle.dumps((function, arguments)), path=path, keeps=keeps, folder=os.getcwd()))
        pid = self._answer_pid()
        # The kernel reuses process ids, so a known exit code belongs to an earlier process. The server reports the end
        # of a process only after its id.
        self._exit_codes.pop(pid, None)
        return pid

    def serves(self) -> bool:
        """Return whether the server answers. If it does not, it is ended."""
        try:
            self._send(STILL_THERE)
            self._answer(str)
        except MeshmarkError:
            return False
        return True

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a process that `call` started, or None while it lives as far as is known."""
        self.listen(0)
        return self._exit_codes.get(pid, LOST_EXIT_CODE if self.is_gone else None)

    def listen(self, seconds: float) -> None:
        """Record the children that have ended, and wait at most `seconds` for the first."""
        while not self.is_gone and self._channel.poll(seconds):
            self._hear()
            seconds = 0

    def _send(self, order: object) -> None:
        try:
            self._channel.send(order)
        except OSError as error:
            stopped = isinstance(error, BlockingIOError)
            self.kill()
            raise MeshmarkError(_SILENT if stopped else _gone()) from error

    def _answer_pid(self) -> int:
        return self._answer(int)

    def _answer(self, kind: type[_Kind]) -> _Kind:
        while self._speaks(_ANSWER_SECONDS):
            if isinstance(answer := self._hear(), kind):
                return answer
            if self.is_gone:
                raise MeshmarkError(_gone())
        self.kill()
        raise MeshmarkError(_SILENT)

    def _speaks(self, seconds: float) -> bool:
        """Return whether the server writes something in time, or ends. False at once if it has been stopped for a
        while.
        """
        now = awake = time.monotonic()
        deadline = now + seconds
        while not self._channel.poll(max(0.0, min(0.5, deadline - now))):
            now = time.monotonic()
            if process_state(self.pid) != "T":
                awake = now
            if now > deadline or now - awake > _STOPPED_SECONDS:
                return False
        return True

    def _hear(self) -> object:
        try:
            told = self._channel.recv()
        except (EOFError, OSError):
            self.is_gone = True
            return None
        if isinstance(told, Ended):
            self._exit_codes[told.pid] = told.exit_code
        return told

    def kill(self) -> None:
        """Kill the server, which may not respond. If it ended long ago, its id may now be another process's."""
        if has_variable(self.pid, LAUNCHER, str(os.getpid())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End it, and all that it has forked."""
        self.is_gone = True
        self._finalizer()


def _close(channel: Connection, process: subprocess.Popen[bytes] | None) -> None:
    with contextlib.suppress(OSError):  # it is gone, or stopped
        channel.send(LEAVE)
    channel.close()
    if process is not None:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # amid an import
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # inside the kernel
                process.wait(_END_SECONDS)
