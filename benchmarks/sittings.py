"""Trials in several processes at once: while one launch starts up, or its first rank assesses, another can compute."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path

from benchmarks.trials import Cell, Court, Trial, correct_cells
from meshmark.adapter.registry import builtin_adapters
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.forkserver_launcher import ForkserverLauncher
from meshmark.run.launch import Launcher
from tests.broken.mutants import BY_NAME, target

NUM_SITTINGS = 2


@contextlib.contextmanager
def sitting(names: Sequence[str]) -> Iterator[tuple[Court, Launcher, Path]]:
    """A court of its own, with its cluster and folder, that knows the mutants called `names`."""
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec()) as cluster:
        launcher = ForkserverLauncher(cluster)  # one a cluster: it counts launches in the store
        court = Court(launcher, {name: target(name) for name in names} | builtin_adapters(), Path(folder))
        try:
            yield court, launcher, Path(folder)
        finally:
            court.close()


def try_all(names: Sequence[str], adapters: Sequence[str]) -> tuple[list[Trial], list[Cell]]:
    """Every mutant of `names`, and every clause of the correct `adapters` (keys of LAYOUTS); told as they come."""
    spawn = multiprocessing.get_context("spawn")
    trials, cells = [], []
    with ProcessPoolExecutor(NUM_SITTINGS, mp_context=spawn, initializer=_open, initargs=(names,)) as pool:
        judged = [pool.submit(_cells, adapter) for adapter in adapters]
        for trial, seconds in pool.map(_try, names):
            state, remark = "caught" if trial.caught else "SURVIVED", "" if trial.named else "MISNAMED "
            print(f"{state:<8} {trial.mutant.name:<50} {seconds:4.1f} s {remark}{trial.told[:300]}", flush=True)
            trials.append(trial)
        for cell in (cell for future in judged for cell in future.result()):
            print(f"{cell.finding.result:<11} {cell.adapter} {cell.clause} {cell.finding.evidence[:200]}", flush=True)
            cells.append(cell)
    return trials, cells


_court: Court
"""Of this process."""


def _open(names: Sequence[str]) -> None:
    global _court
    stack = contextlib.ExitStack()
    _court = stack.enter_context(sitting(names))[0]
    Finalize(None, stack.close, exitpriority=10)


def _try(name: str) -> tuple[Trial, float]:
    started = time.monotonic()
    return _court.attempt(BY_NAME[name]), time.monotonic() - started


def _cells(adapter: str) -> list[Cell]:
    return list(correct_cells(_court, adapter))
