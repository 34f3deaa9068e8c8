"""DDP whose rank 1 comes to grief in its third step: what a launch must survive and tell."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
from torch import Tensor

from meshmark import rank_progress
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.reference.data import Batch
from meshmark.spec.case import Case


class Accident(DDP):
    """Calls `happen` on rank 1 before its third step's forward, or that of step `at`."""

    at = 3

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, DDPEngine)
        whole, steps = engine.backward, 0

        def backward(batch: Batch) -> Tensor:
            nonlocal steps
            steps += 1
            if steps == self.at and context.rank == 1:
                self.happen(engine)
            return whole(batch)

        engine.backward = backward  # type: ignore[method-assign]
        return engine

    def happen(self, engine: DDPEngine) -> None:
        raise NotImplementedError


class Raises(Accident):
    def happen(self, engine: DDPEngine) -> None:
        print("about to raise")
        raise ArithmeticError("planted in step 3")


class TellsFolders(Accident):
    """Raises where this rank's temporary files and compiled code go."""

    def happen(self, engine: DDPEngine) -> None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        raise AssertionError(f"{tempfile.gettempdir()}{os.pathsep}{cache_dir()}")


class Killed(Accident):
    def happen(self, engine: DDPEngine) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Accident):
    def happen(self, engine: DDPEngine) -> None:
        if told := os.environ.get("MESHMARK_TEST_HANGS"):
            Path(told).touch()
        self.wait_for_ever()

    def wait_for_ever(self) -> None:
        while True:
            time.sleep(3600)


class HangsInMeshmark(Accident):
    """Plants an endless loop in Meshmark's own code, which the rank runs into after a step that is fine."""

    def happen(self, engine: DDPEngine) -> None:
        planted: dict[str, Callable[[], None]] = {}
        exec(compile("def advance():\n    while True: pass\n", rank_progress.__file__, "exec"), planted)
        rank_progress.advance = planted["advance"]


class Slow(DDP):
    """Takes its time over every step on one rank, for which the others wait."""

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        whole = engine.backward

        def backward(batch: Batch) -> Tensor:
            time.sleep(3.0 * context.rank)
            return whole(batch)

        engine.backward = backward  # type: ignore[method-assign]
        return engine


class HangsAlone(Accident):
    """While its peer, which needs nothing of it, comes on."""

    at = 4

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, DDPEngine)
        engine.module.require_backward_grad_sync = False
        return engine

    def happen(self, engine: DDPEngine) -> None:
        time.sleep(3600)


class Stopped(Accident):
    """Not even a signal handler runs in a stopped process."""

    def happen(self, engine: DDPEngine) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class ExitsEarly(Accident):
    """As if all were well."""

    def happen(self, engine: DDPEngine) -> None:
        os._exit(0)


class StopsServer(Accident):
    """The process that ranks are forked from is stopped; the ranks need it no more."""

    def happen(self, engine: DDPEngine) -> None:
        os.kill(os.getppid(), signal.SIGSTOP)


class KillsServer(Hangs):
    """The process that ranks are forked from is killed, and they with it, but not what they have started."""

    STARTED = ["sleep", "86397"]

    def happen(self, engine: DDPEngine) -> None:
        subprocess.Popen(self.STARTED, start_new_session=True)
        os.kill(os.getppid(), signal.SIGKILL)
        super().happen(engine)


class KillsServerAtTheEnd(Accident):
    """The process that ranks are forked from is killed when all ranks have reported, before one has ended."""

    def happen(self, engine: DDPEngine) -> None:
        sys.stdout = _KillsServerOnFlush()


class _KillsServerOnFlush(io.StringIO):
    """A rank flushes its output after it has written its report."""

    def flush(self) -> None:
        folder = Path(os.environ["TMPDIR"])
        if not (folder / f"report-{os.environ['RANK']}").exists():
            return
        while len(list(folder.glob("report-?"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


class Freezes(Hangs):
    """Not even SIGKILL ends a frozen process, as one inside a driver that hangs."""

    def happen(self, engine: DDPEngine) -> None:
        freezer = Path(f"/sys/fs/cgroup/freezer/meshmark-test-{os.environ['MESHMARK_LAUNCHER']}")
        (freezer / "cgroup.procs").write_text(str(os.getpid()))
        (freezer / "freezer.state").write_text("FROZEN")
        super().happen(engine)


class WritesToFullDisk(Accident):
    """As a framework's own file does."""

    def happen(self, engine: DDPEngine) -> None:
        try:
            Path("/dev/full").write_bytes(b"a checkpoint")
        except OSError as error:
            raise RuntimeError("could not save") from error


class FillsDisk(Accident):
    """That of the launch, with what it prints, and ends in silence."""

    def happen(self, engine: DDPEngine) -> None:
        with contextlib.suppress(OSError):
            while True:
                os.write(1, bytes(2**16))
        os._exit(1)


class OutOfMemory(Accident):
    def happen(self, engine: DDPEngine) -> None:
        torch.empty(2**50)


class NotANumber(Accident):
    def happen(self, engine: DDPEngine) -> None:
        with torch.no_grad():
            next(engine.module.parameters()).fill_(float("nan"))


class LeavesChild(Accident):
    """A process that the rank started must not outlive it."""

    def happen(self, engine: DDPEngine) -> None:
        if os.fork() == 0:
            time.sleep(3600)
        raise ArithmeticError("with a child running")


class LeavesSharedMemory(Accident):
    """Shared memory that Python's resource tracker, and a function of `atexit`, remove when the process has ended."""

    def happen(self, engine: DDPEngine) -> None:
        self.tracked = SharedMemory(create=True, size=64)
        own = SharedMemory(create=True, size=64, name=f"{self.tracked.name}_own")
        resource_tracker.unregister(own._name, "shared_memory")  # type: ignore[attr-defined]
        atexit.register(own.unlink)


class LeavesDaemon(Hangs):
    """A process in a session of its own, whose parent is gone at once, and which holds all that it inherits."""

    def happen(self, engine: DDPEngine) -> None:
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            self.wait_for_ever()
        os.waitpid(child, 0)
        super().happen(engine)
