"""All trials by name, what each takes, and the ground that they share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.nodes import two_networks
from benchmarks.cluster import (
    elastic,
    fault_tolerance,
    going_on,
    harmless,
    jobs,
    losses,
    mistakes,
    rays,
    shapes,
    switch,
)
from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import ROOT, Slurm

ON_LOOPBACK: list[Callable[[Slurm], Row]] = [
    shapes.doctor,
    shapes.one_task_a_node,
    shapes.shipped_script,
    shapes.job_array,
    jobs.scancel,
    jobs.requeue,
    jobs.drain,
    jobs.kill_node,
    jobs.time_limit,
    mistakes.contradicted,
    mistakes.uneven,
    mistakes.too_many_tasks,
    mistakes.without_srun,
    mistakes.nobodys_address,
    mistakes.port_in_use,
    mistakes.unknown_nodes,
]
"""Under SLURM, both nodes on this host's loopback device."""
IN_NETWORKS: list[Callable[[Slurm], Row]] = [shapes.one_task_a_rank]
"""Under SLURM, each node in a network of its own."""
ByHand = Callable[[Path, Sequence[int]], Mapping[str, Callable[[], Row]]]
BY_HAND: list[ByHand] = [
    harmless.harmless,
    losses.node_losses,
    going_on.goes_on,
    elastic.elastic,
    fault_tolerance.by_torchft,
    losses.unlike,
    losses.full,
    rays.by_ray,
    switch.doctors,
]
"""Without SLURM, in networks."""
_NETWORKS = ("ip", "unshare", "nsenter")
_SLURM = ("munged", "slurmctld", "slurmd", "srun")
_ALSO = {
    "clocks": ("faketime",),
    "slow_link": ("tc",),
    "lossy_link": ("iptables",),
    "doctor_finds": ("tc",),
    "ray": ("ray",),
    **{f"torchft_{reducer.name.lower()}": ("torchft_lighthouse",) for reducer in fault_tolerance.Reducer},
}
"""Commands that single trials take beside those of their ground."""
_PACKAGES = "apt-get install slurmctld slurmd slurm-client munge iproute2 iptables faketime; pip install .[ray,torchft]"


class Ground:
    """Clusters that trials run on, each made when the first trial asks for it. Use as a context manager, which ends
    them."""

    def __init__(self, folder: Path) -> None:
        """`folder`: with a short path, for sockets are in it."""
        self.folder, self._stack = folder, contextlib.ExitStack()

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @functools.cached_property
    def loopback(self) -> Slurm:
        """Both nodes on this host."""
        return self._stack.enter_context(Slurm(self.folder / "loopback"))

    @functools.cached_property
    def networks(self) -> list[int]:
        """A process in each of two that one link joins."""
        return self._stack.enter_context(two_networks())

    @functools.cached_property
    def by_hand(self) -> Path:
        """The folder of trials without SLURM."""
        folder = self.folder / "by-hand"
        folder.mkdir()
        return folder

    def left(self) -> list[str]:
        """Return complaints about processes that should be gone after exit."""
        pids = self.loopback.left() if "loopback" in vars(self) else []
        return [f"SLURM left processes {pids}"] if pids else []


@dataclass(frozen=True, kw_only=True)
class Named:
    """One trial."""

    name: str
    run: Callable[[Ground], Row]
    needs: tuple[str, ...]
    """Commands."""

    def lacks(self) -> str:
        """Why this machine cannot run it; empty where it can."""
        if os.geteuid():
            return "it starts daemons and makes networks: run it as root"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        if missing := [command for command in self.needs if not shutil.which(command, path=path)]:
            return f"{', '.join(missing)}: not installed; {_PACKAGES}"
        return _uncommitted()


@functools.cache
def _uncommitted() -> str:
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return f"--resume goes on from a clean commit alone; commit first:\n{changed.rstrip()}" if changed else ""


def trials() -> list[Named]:
    """In the order in which they run. Nothing is started to know their names."""
    found = [Named(name=t.__name__, run=functools.partial(_on_loopback, t), needs=_SLURM) for t in ON_LOOPBACK]
    needs = (*_SLURM, *_NETWORKS)
    found += [Named(name=t.__name__, run=functools.partial(_in_networks, t), needs=needs) for t in IN_NETWORKS]
    for make in BY_HAND:
        for name in make(Path(), ()):
            needs = (*_NETWORKS, *_ALSO.get(name, ()))
            found.append(Named(name=name, run=functools.partial(_by_hand, make, name), needs=needs))
    return found


def _on_loopback(trial: Callable[[Slurm], Row], ground: Ground) -> Row:
    return trial(ground.loopback)


def _in_networks(trial: Callable[[Slurm], Row], ground: Ground) -> Row:
    """Its SLURM ends with it: what strikes links later would strike its daemons."""
    with Slurm(ground.folder / "slurm", ground.networks) as slurm:
        row = trial(slurm)
    left = slurm.left()
    return dataclasses.replace(row, wrong=[*row.wrong, f"SLURM left processes {left}"]) if left else row


def _by_hand(make: ByHand, name: str, ground: Ground) -> Row:
    return make(ground.by_hand, ground.networks)[name]()
