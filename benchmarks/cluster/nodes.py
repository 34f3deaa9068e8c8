"""Two nodes, each in a network of its own and started by hand or by torchrun."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.nodes import HOSTS, enter
from benchmarks.cluster.slurm import ROOT, Slurm
from benchmarks.cluster.trial import BEGIN_SECONDS, Trial

SHAPE = "2 x 1 x 1, networks"
_RDZV = f"{HOSTS[0]}:29500"


class Nodes:
    """Both, running one trial; use as a context manager, which ends what is left of them."""

    def __init__(self, folder: Path, networks: Sequence[int], name: str) -> None:
        """They share no folder for results but each has one."""
        self.networks, self._base = networks, f"{os.getpid()}-{name}"
        self.trial = Trial(folder, name, f"{self._base}-0")
        self._secret = secrets.token_hex(16)
        self._started: list[subprocess.Popen[bytes]] = []
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        """The suites, by node."""

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in range(len(self.networks)):
            for pid in self.left(node):
                processes.send(pid, signal.SIGKILL)
        for started in self._started:
            started.wait()

    def left(self, node: int) -> list[int]:
        """Its processes."""
        return processes.marked(f"{self._base}-{node}")

    def send(self, node: int, number: signal.Signals) -> None:
        for pid in self.left(node):
            processes.send(pid, number)

    def by_hand(self, node: int, *options: str, prefix: Sequence[str] = (), **environment: str) -> None:
        """`options` of pytest, the last word; `prefix`: of the command."""
        which = ["--nnodes", "2", "--node-rank", str(node), "--rdzv", _RDZV]
        self._start(node, [*prefix, sys.executable, "-m", "pytest", "suites"], [*which, *options], environment)

    def by_torchrun(self, node: int, tasks: int, *meeting: str) -> None:
        """`meeting`: how its agents find each other."""
        torchrun = ["torchrun", "--nnodes=2", f"--nproc-per-node={tasks}", f"--local-addr={HOSTS[node]}", *meeting]
        self._start(node, [*torchrun, "-m", "pytest", "suites"], [], {})

    def _start(self, node: int, command: Sequence[str], options: Sequence[str], environment: dict[str, str]) -> None:
        told = [*self.trial.arguments(), "--results", str(self.results(node)), *options]
        own = {**self.trial.environment, **environment}
        self.running[node] = self.start(node, self.output(node), [*command, *told], **own)

    def start(self, node: int, output: Path, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Any command there, which ends with this at the latest."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {processes.MARK: f"{self._base}-{node}", "MESHMARK_RDZV_SECRET": self._secret, "PATH": path}
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(output, "wb") as file:
            started = subprocess.Popen(
                [*enter(self.networks[node]), *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **paths, **own, **environment},
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def results(self, node: int) -> Path:
        return self.trial.results if node == 0 else self.trial.folder / "results1"

    def output(self, node: int) -> Path:
        return self.trial.output if node == 0 else self.trial.folder / "output1"

    def text(self, node: int) -> str:
        return self.output(node).read_text(errors="replace") if self.output(node).exists() else ""

    def code(self, node: int) -> int | None:
        """Exit code."""
        return self.running[node].poll()

    def await_end(self, node: int, seconds: float = BEGIN_SECONDS) -> bool:
        """Whether nothing of it was left in time."""
        return Slurm.wait(lambda: self.code(node) is not None and not self.left(node), seconds)
