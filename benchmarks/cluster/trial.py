"""A run of the suites under a scheduler: a case, one that waits at a gate, and another; and whether all that was
recorded is kept, and no more than once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.adapters import BEGUN
from benchmarks.cluster.adapters import GATE
from benchmarks.cluster.slurm import Slurm
from meshmark.records.record import Record, Status
from meshmark.records.record_file import Reading, read_records

_NAMES = ("chaos.adapters:ddp_0", "cluster.adapters:Waits", "chaos.adapters:ddp_1")
BEGIN_SECONDS = 900.0
"""For pytest on two nodes to collect, and for a server to import PyTorch, on a machine that others use."""
END_SECONDS = 40.0
"""From a fault to the last process's end: 30 s, and SLURM's own."""


class Trial:
    """Its folder, its gate, and what a job is told."""

    def __init__(self, parent: Path, name: str, mark: str) -> None:
        """`mark`: of the processes that run it, by which those that are left are told."""
        self.mark, self.folder = mark, parent / name
        self.results, self.output = self.folder / "results", self.folder / "output"
        self.folder.mkdir()
        self.gate = self.folder / "gate"
        self.gate.touch()
        (self.folder / "begun").touch()

    @property
    def environment(self) -> dict[str, str]:
        own = {GATE: self.gate, BEGUN: self.folder / "begun", "RESULTS": self.results}
        return {name: str(value) for name, value in own.items()}

    def arguments(self, ranks: int = 2) -> list[str]:
        """Return the arguments of pytest."""
        adapters = [part for name in _NAMES for part in ("--adapter", f"benchmarks.{name}")]
        options = ["--world", str(ranks), "--workload", "gpt-mini", "--steps", "3", "-k", "throughput"]
        return [*adapters, *options, "--timing-budget", "0", "--time-limit", "900", "-p", "no:cacheprovider", "-v"]

    def await_gate(self, ranks: int = 2) -> bool:
        """Until every rank of the second case waits."""
        places = [self.folder / f"waits-{rank}" for rank in range(ranks)]
        return Slurm.wait(lambda: all(place.exists() for place in places), BEGIN_SECONDS)

    def open(self) -> None:
        self.gate.unlink(missing_ok=True)

    def reading(self) -> Reading:
        return read_records(self.results)

    def complaints(self, *, repeated: int = 0) -> list[str]:
        """Return the complaints about a run that ended, in one go or several: the case before the gate must have one
        record, which later goes kept at least `repeated` times, and all three cases must be good."""
        reading = self.reading()
        good = [record for record in reading.records if record.outcome.status is Status.OK]
        found = Counter(record.case.adapter for record in good)
        wrong = [f"{name}: {count} good records" for name, count in found.items() if count != 1]
        wrong += [f"{len(found)} cases of 3 have good records"] if len(found) != 3 else []
        kept = self.text().count("kept: the results folder holds this pass")
        wrong += [f"kept {kept} times, expected {repeated} at least"] if kept < repeated else []
        wrong += list(reading.complaints)
        wrong += [f"left {path.name}" for path in self.results.glob("scratch-*")]
        return wrong + ([self.text()[-600:]] if wrong else [])

    def kept(self) -> list[Record]:
        return [record for record in self.reading().records if record.outcome.status is Status.OK]

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def seconds_to_end(self, daemons: Collection[int] = ()) -> float:
        """Until no process but the daemons is left; `END_SECONDS` and more where some are."""
        began = time.monotonic()
        Slurm.wait(lambda: not self.strays(daemons), END_SECONDS)
        return time.monotonic() - began

    def strays(self, daemons: Collection[int] = ()) -> list[int]:
        return [pid for pid in processes.marked(self.mark) if pid not in daemons]
