"""Trials in several processes at once: while one launch starts up, or its first rank assesses, another can compute."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from benchmarks.honest import Group, measure_single
from benchmarks.smallest import Smallest
from benchmarks.trials import Cell, MutantRunner, Trial, correct_cells
from meshmark.adapter.registry import builtin_adapters
from meshmark.environment import Environment
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher, Launcher
from meshmark.launch.processes import die_with_parent
from meshmark.records.record import Record
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from tests.broken.mutants import BY_NAME, target
from tests.correct.registry import ENGINES

NUM_PROCESSES = 2


@contextlib.contextmanager
def make_runner(names: Sequence[str]) -> Iterator[tuple[MutantRunner, Launcher, Path]]:
    """Yield a runner of mutants, with its cluster and folder, that knows the mutants called `names`."""
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec()) as cluster:
        launcher = ForkserverLauncher(cluster)  # one a cluster: it counts launches in the store
        mutant_runner = MutantRunner(
            launcher, {name: target(name) for name in names} | builtin_adapters() | ENGINES, Path(folder)
        )
        try:
            yield mutant_runner, launcher, Path(folder)
        finally:
            mutant_runner.close()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The result of one task. Exactly one of the last five fields is set."""

    code: list[str]
    """Commit and machine, and versions of packages."""
    name: str
    """What was tried: a mutant, a key of LAYOUTS, a case or a problem, with its seed."""
    seconds: float
    trial: Trial | None = None
    cells: list[Cell] | None = None
    record: Record | None = None
    smallest: Smallest | None = None
    group: Group | None = None

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


KINDS = ("trial", "cells", "record", "smallest", "group")
"""The fields of `Part` that hold results."""
IN_PARALLEL = ("trial", "cells", "group")
"""Those of KINDS that are measured in NUM_PROCESSES processes at once."""


class Parts:
    """The results of a campaign, one a line, kept as they are measured.

    A campaign takes hours. It may be interrupted, and goes on where it stopped, as long as the code, its packages and
    the machine are the same. Results of a commit with changes on top are not used again.
    """

    def __init__(self, path: Path, here: Environment) -> None:
        self._path = path
        self.code = [here.commit, here.machine, *(f"{name} {version}" for name, version in here.versions.items())]
        found = [_part(line) for line in path.read_text().splitlines()] if path.exists() else []
        same = [part for part in found if part and part.code == self.code and not here.commit.endswith("-dirty")]
        self._held = {(part.kind, part.name): part for part in same}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(_line(part) for part in self._held.values()))

    @property
    def seconds(self) -> float:
        """How long all that is held took to measure, by the clock."""
        return sum(part.seconds / (NUM_PROCESSES if part.kind in IN_PARALLEL else 1) for part in self._held.values())

    def get(self, kind: str, name: str) -> Part | None:
        return self._held.get((kind, name))

    def add(self, part: Part) -> None:
        self._held[part.kind, part.name] = part
        with self._path.open("a") as file:
            file.write(_line(part))

    def once(self, kind: str, name: str, measure: Callable[[], Any]) -> Any:  # noqa: ANN401 - of one field's type
        """Return what is held of `kind` (of KINDS) and `name`; measure and keep it where nothing is."""
        part = self.get(kind, name)
        if part is None:
            started = time.monotonic()
            found = {kind: measure()}
            part = Part(code=self.code, name=name, seconds=time.monotonic() - started, **found)
            self.add(part)
        return getattr(part, kind)


def _line(part: Part) -> str:
    return json.dumps(encode(part)) + "\n"


def _part(line: str) -> Part | None:
    """None of a line that was cut off, or is of another form."""
    try:
        found: Part = decode(Part, json.loads(line))
    except ValueError:
        return None
    return found


def try_all(names: Sequence[str], adapters: Sequence[str], parts: Parts) -> tuple[list[Trial], list[Cell]]:
    """Every mutant of `names`, and every clause of the correct `adapters` (keys of LAYOUTS); told as they come. What
    `parts` holds is not run again."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn, initializer=_open, initargs=(names, os.getpid())) as pool:

        def begun(run: Callable[[str, list[str]], Part], name: str, *, cells: bool) -> Future[Part] | Part:
            return parts.get("cells" if cells else "trial", name) or pool.submit(run, name, parts.code)

        judged = [begun(_cells, adapter, cells=True) for adapter in adapters]
        tried = [begun(_try, name, cells=False) for name in names]
        found = [_ended(part, parts) for part in (*judged, *tried)]
    return [part.trial for part in found if part.trial], [cell for part in found for cell in part.cells or ()]


def measure_groups(cases: Sequence[Case], parts: Parts) -> list[Group]:
    """Correct runs of each of `cases` in bulk. What `parts` holds is not run again."""
    names = [f"{case.id} seed {case.workload.seed}" for case in cases]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn, initializer=_alone, initargs=(os.getpid(),)) as pool:
        begun = [
            parts.get("group", name) or pool.submit(_group, name, case, parts.code)
            for name, case in zip(names, cases, strict=True)
        ]
        found = [_ended(part, parts) for part in begun]
    return [part.group for part in found if part.group]


def _alone(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)


def _group(name: str, case: Case, code: list[str]) -> Part:
    started = time.monotonic()
    group = measure_single(case)
    return Part(code=code, name=name, seconds=time.monotonic() - started, group=group)


def _ended(begun: Future[Part] | Part, parts: Parts) -> Part:
    if isinstance(begun, Part):
        return begun
    part = begun.result()
    parts.add(part)
    if trial := part.trial:
        state, remark = "caught" if trial.caught else "SURVIVED", "" if trial.named else "MISNAMED "
        print(f"{state:<8} {part.name:<50} {part.seconds:4.1f} s {remark}{trial.explanation[:300]}", flush=True)
    for cell in part.cells or ():
        print(f"{cell.finding.result:<11} {cell.adapter} {cell.clause} {cell.finding.evidence[:200]}", flush=True)
    return part


_mutant_runner: MutantRunner
"""The runner of this process."""


def _open(names: Sequence[str], parent: int) -> None:
    global _mutant_runner
    die_with_parent(parent)  # a pool that loses it would try what is queued for another hour
    stack = contextlib.ExitStack()
    _mutant_runner = stack.enter_context(make_runner(names))[0]
    Finalize(None, stack.close, exitpriority=10)


def _try(name: str, code: list[str]) -> Part:
    started = time.monotonic()
    trial = _mutant_runner.attempt(BY_NAME[name])
    return Part(code=code, name=name, seconds=time.monotonic() - started, trial=trial)


def _cells(adapter: str, code: list[str]) -> Part:
    started = time.monotonic()
    cells = list(correct_cells(_mutant_runner, adapter))
    return Part(code=code, name=adapter, seconds=time.monotonic() - started, cells=cells)
