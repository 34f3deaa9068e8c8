"""The launcher's side of a process that forks others.

A server imports its modules once, and every process that it forks has them. It may also branch into another server,
which imports more under an environment of its own. So PyTorch is imported once in a run, and a framework once and only
where it is asked for. Whatever a framework changes at import, in PyTorch or in the process, affects no other
framework.

Launcher and server communicate through a pair of connected sockets without a name. When the launcher's end is closed,
for whatever reason, the server ends its children and itself. (Python's own forkserver is not used: there is one in a
process, it takes its environment from whoever starts it, and it listens at an address.)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TypeVar

from meshmark.errors import MeshmarkError
from meshmark.launch.folders import FOLDERS, folder_prefix
from meshmark.launch.processes import has_variable, process_state
from meshmark.launch.server_process import CUDA_STARTED, LAUNCHER, LEAVE, STILL_THERE, Branch, Call, Ended

_Kind = TypeVar("_Kind")

LOST_EXIT_CODE = 255
"""Exit code of a process whose server is gone, so that nobody saw how it ended."""
_END_SECONDS = 10.0
_ANSWER_SECONDS = 30
"""For a fork, or a word, on a machine that swaps."""
_STOPPED_SECONDS = 5.0
"""A server that is stopped for so long while something is waited for is not waited for any longer."""
_GONE = "the process that ranks are forked from has ended: killed, for want of memory?"
_SILENT = "the process that ranks are forked from does not answer, and was ended; the next case gets a new one"


def _is_installed(place: str) -> bool:
    """Return whether an entry of `sys.path` belongs to this interpreter rather than to a project."""
    return place.startswith((sys.prefix, sys.base_prefix))


class ForkServer:
    """The launcher's end of a server."""

    def __init__(
        self, channel: Connection, pid: int, process: subprocess.Popen[bytes] | None, python: str = sys.executable
    ) -> None:
        """`process`: where it is this process's own child. `python`: the interpreter that it runs."""
        self.pid, self.is_gone, self._python = pid, False, python
        self._channel, self._exit_codes = channel, dict[int, int]()
        with socket.socket(fileno=os.dup(channel.fileno())) as end:  # a stopped server reads nothing
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _ANSWER_SECONDS, 0))
        self._finalizer = weakref.finalize(self, _close, channel, process)

    @classmethod
    def start(cls, environment: Mapping[str, str], modules: Sequence[str], python: str = sys.executable) -> ForkServer:
        """A server with the whole of `environment`, not yet ready; it ends with this process."""
        channel, its_end = Pipe()
        # Without the working directory, which `-c` puts first: it may be a stranger's.
        path = "import sys; sys.path[:] = filter(None, sys.path)"
        code = f"{path}; from meshmark.launch.server_process import main; main({its_end.fileno()})"
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
        """A server with all that this one has, and more; not yet ready."""
        channel, its_end = Pipe()
        with its_end:
            self._send(Branch(environment=environment, modules=modules))
            with contextlib.suppress(OSError):  # then there is no answer either
                send_handle(self._channel, its_end.fileno(), self.pid)
        return ForkServer(channel, self._answer_pid(), None, self._python)

    def await_ready(self, what: str, *, seconds: float) -> None:
        """Until its modules are imported. Raises `MeshmarkError` when that takes too long, and ends it."""
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
        """Id of a new process that calls `function`, and exits with 0 unless it raises. Raises `MeshmarkError` when
        the server is gone, or does not answer; then it is ended."""
        keeps = self._python != sys.executable
        path = [place for place in sys.path if not (keeps and _is_installed(place))]
        self._send(Call(pickled=pickle.dumps((function, arguments)), path=path, keeps=keeps, folder=os.getcwd()))
        pid = self._answer_pid()
        # The kernel gives numbers out again: an exit code that is known already is that of an earlier process. The
        # server says that a process has ended only after it has said its number.
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
        """Take notice of children that have ended; at most so long until the first."""
        while not self.is_gone and self._channel.poll(seconds):
            self._hear()
            seconds = 0

    def _send(self, order: object) -> None:
        try:
            self._channel.send(order)
        except OSError as error:
            stopped = isinstance(error, BlockingIOError)
            self.kill()
            raise MeshmarkError(_SILENT if stopped else _GONE) from error

    def _answer_pid(self) -> int:
        return self._answer(int)

    def _answer(self, kind: type[_Kind]) -> _Kind:
        while self._speaks(_ANSWER_SECONDS):
            if isinstance(answer := self._hear(), kind):
                return answer
            if self.is_gone:
                raise MeshmarkError(_GONE)
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
        """End it though it does not listen. It may have ended long ago: then its number can be another process's."""
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
