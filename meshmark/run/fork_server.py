"""A process that forks others, and what the launcher holds of it.

A server imports its modules once; whatever it forks has them in place. It may also branch: into another server that
imports more on top, under an environment of its own. So PyTorch is imported once a run, a framework once and only where
it is asked for, and what a framework changes when it is imported, in PyTorch or in the process, reaches no other.

Launcher and server speak through a pair of connected sockets that have no name; the server ends its children, and
itself, when the launcher's end of that pair is closed, however that happened. (Python's own forkserver is one a
process, takes its environment from whoever starts it, and listens at an address.)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import NoReturn

from meshmark.errors import MeshmarkError
from meshmark.run.orphans import adopt_orphans, die_with_parent, end_children

LAUNCHER = "MESHMARK_LAUNCHER"
"""Variable with the launcher's process id, by which all that descends from a server is told."""
LOST_EXIT_CODE = 255
"""Of a process whose server is gone: nobody was there to see how it ended."""
_END_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Fork, and call a function there."""

    pickled: bytes
    """The function and its arguments: for the fork to open, so that the server imports nothing for it."""
    path: list[str]
    """The launcher's `sys.path`."""
    folder: str
    """And its working directory."""


@dataclass(frozen=True, kw_only=True)
class _Branch:
    """Fork, and serve there, over a socket that follows."""

    environment: Mapping[str, str]
    modules: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """What a server tells of a child."""

    pid: int
    exit_code: int
    """Negative: the signal that killed it."""


class ForkServer:
    """The launcher's end of a server."""

    def __init__(self, channel: Connection, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        """`process`: where it is this process's own child."""
        self.pid, self.lost = pid, False
        self._channel, self._exit_codes = channel, dict[int, int]()
        self._finalizer = weakref.finalize(self, _close, channel, process)

    @classmethod
    def start(cls, environment: Mapping[str, str], modules: Sequence[str]) -> ForkServer:
        """A server with the whole of `environment`, not yet ready; it ends with this process."""
        channel, its_end = Pipe()
        code = f"import sys; from meshmark.run.fork_server import main; main({its_end.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *modules],
            env={**environment, LAUNCHER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            pass_fds=[its_end.fileno()],
            start_new_session=True,  # Ctrl-C is the launcher's
        )
        its_end.close()
        return cls(channel, process.pid, process)

    def branch(self, environment: Mapping[str, str], modules: Sequence[str]) -> ForkServer:
        """A server with all that this one has, and more; not yet ready."""
        channel, its_end = Pipe()
        self._channel.send(_Branch(environment=environment, modules=modules))
        send_handle(self._channel, its_end.fileno(), self.pid)
        its_end.close()
        return ForkServer(channel, self._answer_pid(), None)

    def await_ready(self, what: str, *, seconds: float) -> None:
        """Until its modules are imported. Raises `MeshmarkError` when that takes too long, and ends it."""
        if self._channel.poll(seconds):
            with contextlib.suppress(EOFError, OSError):
                self._channel.recv()
                return
            message = f"importing {what} ended the process that ranks are forked from"
        else:
            message = f"importing {what} took longer than {seconds:g} s; --time-limit gives it longer"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()
        raise MeshmarkError(message)

    def call(self, function: Callable[..., object], *arguments: object) -> int:
        """Id of a new process that calls `function`, and exits with 0 unless it raises."""
        self._channel.send(_Call(pickled=pickle.dumps((function, arguments)), path=list(sys.path), folder=os.getcwd()))
        return self._answer_pid()

    def exit_code(self, pid: int) -> int | None:
        """Of a process that `call` began; None while it lives, as far as was told."""
        self.listen(0)
        return self._exit_codes.get(pid, LOST_EXIT_CODE if self.lost else None)

    def listen(self, seconds: float) -> None:
        """Take notice of children that have ended; at most so long until the first."""
        while not self.lost and self._channel.poll(seconds):
            self._hear()
            seconds = 0

    def _answer_pid(self) -> int:
        while not isinstance(answer := self._hear(), int):
            if self.lost:
                raise MeshmarkError("the process that ranks are forked from has ended: killed, for want of memory?")
        return answer

    def _hear(self) -> object:
        try:
            told = self._channel.recv()
        except (EOFError, OSError):
            self.lost = True
            return None
        if isinstance(told, _Ended):
            self._exit_codes[told.pid] = told.exit_code
        return told

    def close(self) -> None:
        """End it, and all that it has forked."""
        self.lost = True
        self._finalizer()


def _close(channel: Connection, process: subprocess.Popen[bytes] | None) -> None:
    channel.close()
    if process is not None:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # amid an import
            process.kill()
            process.wait()


# In the server.


def execute(command: Sequence[str], environment: Mapping[str, str], log: str) -> NoReturn:
    """For `call`: become `command`, in a session of its own, with its output in `log`."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.execvpe(command[0], list(command), dict(environment))


def main(handle: int) -> NoReturn:
    """A server's process, from its start to its end; its arguments are modules."""
    die_with_parent(int(os.environ[LAUNCHER]))  # an import can hang
    _serve(Connection(handle), sys.argv[1:])


def _serve(channel: Connection, modules: Sequence[str]) -> NoReturn:
    """Import `modules`, say so, and do what the launcher asks for until it is gone."""
    adopt_orphans()
    _import(modules)
    gc.freeze()  # keeps the children's collector from touching, and so copying, every shared page
    die_with_parent(None)  # from here on the server sees by itself that the launcher is gone, and ends its children
    with contextlib.suppress(EOFError, OSError):
        channel.send("ready")
        _obey(channel)
    end_children(os.getpid())
    os._exit(0)


def _obey(channel: Connection) -> NoReturn:
    """Raises `EOFError` or `OSError` when the launcher is gone."""
    with _woken_by_children() as (woken, waker):
        while True:
            ready = wait([channel, woken])
            if woken in ready:
                woken.recv(4096)
                for ended in _ended_children():
                    channel.send(ended)
            if channel in ready:
                order, server = channel.recv(), os.getpid()
                branch = Connection(recv_handle(channel)) if isinstance(order, _Branch) else None
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


def _act(order: _Call | _Branch, branch: Connection | None, server: int) -> NoReturn:
    """What a fork does."""
    try:
        die_with_parent(server)
        if isinstance(order, _Branch):
            assert branch
            os.environ.update(order.environment)
            _serve(branch, order.modules)
        for ending in (signal.SIGTERM, signal.SIGHUP):  # the server ignores them
            signal.signal(ending, signal.SIG_DFL)
        sys.path[:] = order.path
        os.chdir(order.folder)
        function, arguments = pickle.loads(order.pickled)
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ended_children() -> Iterator[_Ended]:
    """Those that nobody has seen end yet; also adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield _Ended(pid=found[0], exit_code=os.waitstatus_to_exitcode(found[1]))


def _import(modules: Sequence[str]) -> None:
    """What cannot be imported is left to the rank that needs it, where it becomes that case's outcome; what frameworks
    print while they are imported is left out for the same reason."""
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
