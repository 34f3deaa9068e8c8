"""`python -m benchmarks.cluster`: real schedulers on this machine, the suites under them, and the page of what became
of them. For root. Exits with 1 when something was wrong."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.chaos.nodes import two_networks
from benchmarks.cluster import elastic, going_on, harmless, jobs, losses, mistakes, rays, shapes, switch
from benchmarks.cluster.page import page
from benchmarks.cluster.row import Row, Whole, begin, finish, keep, kept, whole_of
from benchmarks.cluster.slurm import ROOT, Slurm
from meshmark.environment import describe
from meshmark.errors import MeshmarkError

_KEPT = ROOT / "results" / "cluster" / "rows.json"
ON_LOOPBACK: list[Callable[[Slurm], Row]] = [
    shapes.doctor,
    shapes.one_task_a_node,
    shapes.shipped_script,
    shapes.job_array,
    jobs.scancel,
    jobs.requeue,
    jobs.drain,
    jobs.node_lost,
    jobs.time_limit,
    mistakes.contradicted,
    mistakes.uneven,
    mistakes.too_many_tasks,
    mistakes.without_srun,
    mistakes.nobodys_address,
    mistakes.port_in_use,
    mistakes.unknown_nodes,
]
"""Both nodes on this host's loopback device."""
BY_HAND: list[Callable[[Path, Sequence[int]], dict[str, Callable[[], Row]]]] = [
    harmless.harmless,
    losses.lost,
    going_on.goes_on,
    elastic.elastic,
    losses.unlike,
    losses.full,
    rays.by_ray,
    switch.doctors,
]
"""Without SLURM, in networks."""
IN_NETWORKS: list[Callable[[Slurm], Row]] = [shapes.one_task_a_rank]
"""Each node in a network of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("-k", default="", metavar="REGEX", help="in a trial's name: those alone, beside what is known")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "reports" / "cluster.md")
    parsed = parser.parse_args(arguments)
    try:
        _expect_ready()
    except MeshmarkError as error:
        print(f"cluster-test: {error}", file=sys.stderr)
        return 2
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="mmc-"))
    if not parsed.k:
        begin(_KEPT)
    rows = _tried(folder, parsed.k)
    seconds, good = time.monotonic() - started, not any(row.wrong for row in rows)
    if not parsed.k:
        commit, end = _now()
        finish(Whole(seconds=seconds, trials=len(rows), commit=commit, end=end), _KEPT)
    parsed.output.write_text(page(kept(_KEPT), whole_of(_KEPT)))
    print(f"{len(rows)} trials in {seconds:.0f} s: {'all is well' if good else f'see {folder}'}")
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


def _tried(folder: Path, names: str) -> list[Row]:
    """All trials whose name `names` is found in."""
    rows = _under_slurm(folder / "loopback", [], [t for t in ON_LOOPBACK if re.search(names, t.__name__)])
    with two_networks() as networks:
        rows += _under_slurm(folder / "slurm", networks, [t for t in IN_NETWORKS if re.search(names, t.__name__)])
        (folder / "by-hand").mkdir()
        for trials in BY_HAND:
            for name, trial in trials(folder / "by-hand", networks).items():
                if re.search(names, name):
                    rows += _told([trial()])
    return rows


def _now() -> tuple[str, str]:
    """Commit of the checkout, and date."""
    here = describe("cpu", "gloo", 1)
    return here.commit, here.date


def _under_slurm(folder: Path, networks: Sequence[int], trials: Sequence[Callable[[Slurm], Row]]) -> list[Row]:
    rows = list[Row]()
    if not trials:
        return rows
    with Slurm(folder, networks) as slurm:
        for trial in trials:
            rows += _told([trial(slurm)])
    if left := slurm.left():
        rows += _told([Row(engine="SLURM", shape="", fault="its end", wrong=[f"left processes {left}"])])
    return rows


def _told(rows: Iterable[Row]) -> list[Row]:
    told = list[Row]()
    for row in rows:
        told.append(row)
        commit, date = _now()
        keep(dataclasses.replace(row, commit=commit, date=date), _KEPT)
        seconds = "" if row.seconds is None else f", {row.seconds:.1f} s"
        print(f"{row.engine}, {row.shape}, {row.fault}: {row.told}{seconds}", flush=True)
        for text in row.wrong:
            print(f"  WRONG: {' '.join(text.split())[:900]}", flush=True)
    return told


def _expect_ready() -> None:
    """Raises `MeshmarkError` where this cannot be done."""
    if os.geteuid():
        raise MeshmarkError("it starts daemons and makes networks: run it as root")
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed:
        raise MeshmarkError(f"--resume goes on from a clean commit alone; commit first:\n{changed.rstrip()}")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
