"""Ray on two nodes, each in a network of its own, and examples/ray/'s driver on it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos.nodes import HOSTS
from benchmarks.cluster.nodes import Nodes
from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import Slurm
from benchmarks.cluster.trial import BEGIN_SECONDS, END_SECONDS

_PORT = 6399
_PRIORITY = {"RAY_worker_niceness": "0"}
"""Niceness of Ray's workers: that of the daemons that start them."""
_EACH = 2
"""Ranks of a node."""
_DAEMON = ("--block", "--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats")


def by_ray(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name."""
    return {"ray": lambda: _ray(folder, networks)}


def _ray(folder: Path, networks: Sequence[int]) -> Row:
    with Nodes(folder, networks, "ray") as nodes:
        nodes.trial.open()
        head = ["ray", "start", "--head", f"--port={_PORT}", f"--temp-dir={folder.parent / 'r'}"]
        nodes.start(
            0,
            folder / "ray-0",
            [*head, f"--node-ip-address={HOSTS[0]}", "--include-dashboard=false", *_DAEMON],
            **_PRIORITY,
        )
        time.sleep(1)
        joins = ["ray", "start", f"--address={HOSTS[0]}:{_PORT}", f"--node-ip-address={HOSTS[1]}", *_DAEMON]
        joined = Slurm.wait(lambda: _joins(nodes, folder, joins), BEGIN_SECONDS)
        driver = ["python", "examples/ray/meshmark_ray.py", f"--ranks-per-node={_EACH}", "--"]
        options = [*nodes.trial.arguments(2 * _EACH), "--results", str(nodes.trial.results)]
        address = {"RAY_ADDRESS": f"{HOSTS[0]}:{_PORT}"}
        began = time.monotonic()
        running = nodes.start(0, nodes.trial.output, [*driver, *options], **address, **nodes.trial.environment)
        code = running.wait(BEGIN_SECONDS)
        seconds = time.monotonic() - began
        wrong = [] if joined else ["node 1 did not join"]
        wrong += [f"the driver ended with {code}"] if code else []
        if not Slurm.wait(lambda: not _suites(nodes), END_SECONDS):
            wrong.append(f"left of the suites: {_suites(nodes)}")
        wrong += nodes.trial.complaints()
        hosts = {record.environment.nnodes for record in nodes.trial.kept()}
        wrong += [] if hosts == {2} else [f"on {hosts} nodes"]
    return Row(
        engine="Ray, actors", shape=f"2 x {_EACH} x 1, networks", seconds=seconds, told="3 cases correct", wrong=wrong
    )


def _joins(nodes: Nodes, folder: Path, command: Sequence[str]) -> bool:
    """Whether its daemon stays: it leaves where the head is not there yet."""
    daemon = nodes.start(1, folder / "ray-1", command, **_PRIORITY)
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        return True
    return False


def _suites(nodes: Nodes) -> list[int]:
    """Processes of the suites, beside Ray's own."""
    found = []
    for pid in [*nodes.left(0), *nodes.left(1)]:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "pytest" in words or "meshmark.run" in words:
            found.append(pid)
    return found
