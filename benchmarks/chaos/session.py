"""One run of pytest over many short cases: what has begun, what is recorded, what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.adapters import BEGUN
from benchmarks.chaos.settings import PLAIN, Setting
from meshmark.records.record_file import Reading, read_records

ROOT = Path(__file__).parent.parent.parent
_POLL_SECONDS = 0.005


class Session:
    """Its folder holds results, temporary files and output."""

    def __init__(self, folder: Path, names: Sequence[str], *extra: str, setting: Setting = PLAIN) -> None:
        """`names` of benchmarks.chaos.adapters, in order; `extra` arguments of pytest."""
        self.folder, self.names, self.mark = folder, list(names), f"{os.getpid()}-{folder.name}"
        self.results, self.temporary = folder / "results", folder / "tmp"
        for each in (self.results, self.temporary):
            each.mkdir(parents=True, exist_ok=True)
        self._begun = folder / "begun"
        self._begun.touch()
        self._read, self._lines = 0, list[dict[str, object]]()
        self.setting, self._extra = setting, [*setting.options, *extra]
        self.process: subprocess.Popen[bytes] | None = None
        self.current = ""
        """The case that is to be struck."""
        self.servers_before: frozenset[int] = frozenset()
        """Processes that forked ranks of the cases before it."""

    def start(self, prefix: Sequence[str] = (), options: Sequence[str] = (), **environment: str) -> None:
        """Start pytest. `prefix` stands before the command and may enter a namespace; `options` are for this time."""
        adapters = [part for name in self.names for part in ("--adapter", f"benchmarks.chaos.adapters:{name}")]
        asked = ["--workload", self.setting.workload, "--steps", "3", "--time-limit", f"{self.limit_seconds:g}"]
        file = f"suites/test_{self.setting.suite}.py"
        command = [sys.executable, "-m", "pytest", file, "-p", "no:cacheprovider", "-v", *adapters, *asked]
        inherited = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                [*prefix, *command, "--results", str(self.results), *self._extra, *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**inherited, processes.MARK: self.mark, BEGUN: str(self._begun), **environment},
                preexec_fn=_heed_signals,
            )

    @property
    def limit_seconds(self) -> float:
        return self.setting.limit_seconds

    @property
    def latest_seconds(self) -> float:
        return self.setting.latest_seconds

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def begun(self) -> list[str]:
        """Adapters whose case has begun, in order."""
        return list(dict.fromkeys(self._begun.read_text().split()))

    def recorded(self) -> dict[str, dict[str, object]]:
        """Whole lines of records so far, by adapter."""
        path = self.results / "records.jsonl"
        if path.exists() and path.stat().st_size > self._read:
            with open(path, "rb") as file:
                file.seek(self._read)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._read += len(new)
            self._lines += [json.loads(line) for line in new.splitlines()]
        return {str(line["adapter"]).rpartition(":")[2]: line for line in self._lines if "case" in line}

    @property
    def is_over(self) -> bool:
        """True if the current case has its record."""
        return self.current in self.recorded()

    def ranks(self) -> list[processes.Rank]:
        """Return the ranks of the current case; later ones are not its own."""
        found = processes.ranks_of(self.pid)
        return [] if self.is_over else found

    def num_bytes(self) -> int:
        """Return the size of the file of records, 0 if there is none."""
        path = self.results / "records.jsonl"
        return path.stat().st_size if path.exists() else 0

    def wait(self, true: Callable[[], object], seconds: float, poll: float = _POLL_SECONDS) -> bool:
        """Wait until `true()`, for at most `seconds` or until pytest ends. Return its last value."""
        deadline = time.monotonic() + seconds
        while not true():
            if self.ended or time.monotonic() > deadline:
                return bool(true())
            time.sleep(poll)
        return True

    def await_end(self, seconds: float) -> bool:
        """Whether pytest, and all that descends from it, ended in time: `seconds` after what it printed last.

        Cases may be left to run, and how many seconds they take depends on the machine.
        """
        printed, deadline = -1, 0.0
        while not self.ended or processes.marked(self.mark):
            if (size := self._num_printed()) != printed:
                printed, deadline = size, time.monotonic() + seconds
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _num_printed(self) -> int:
        output = self.folder / "output"
        return output.stat().st_size if output.exists() else 0

    def end(self) -> None:
        """By force, whatever is left."""
        for pid in processes.marked(self.mark):
            processes.send(pid, signal.SIGKILL)
        if self.process:
            self.process.wait()

    def reading(self) -> Reading:
        return read_records(self.results)

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


def _heed_signals() -> None:
    """Restore the handling of Ctrl-C, which processes that a shell starts in the background ignore, as would their
    children."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
