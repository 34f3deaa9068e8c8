"""The launchers by name."""

from __future__ import annotations

from collections.abc import Callable

from meshmark.run.cluster import Cluster
from meshmark.run.forkserver_launcher import ForkserverLauncher
from meshmark.run.launch import Launcher
from meshmark.run.torchrun_launcher import TorchrunLauncher

LAUNCHERS: dict[str, Callable[[Cluster], Launcher]] = {"forkserver": ForkserverLauncher, "torchrun": TorchrunLauncher}
