"""`--on-node-loss continue`: a node, or the link to it, that is gone while a case runs, and a run that goes on."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos.nodes import LINKS, inside
from benchmarks.cluster.nodes import SHAPE, Nodes
from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import Slurm
from benchmarks.cluster.trial import END_SECONDS
from meshmark.records.record import Status

_HAVE = [Status.OK, Status.NODE_LOST, Status.OK, Status.OK]
"""The case before, the one under way, this one again, and another."""


def goes_on(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name."""
    strikes: dict[str, Callable[[Nodes], object]] = {
        "node 1 killed": lambda nodes: nodes.send(1, signal.SIGKILL),
        "node 1 frozen": lambda nodes: nodes.send(1, signal.SIGSTOP),
        "link down": lambda nodes: inside(networks[1], "ip", "link", "set", LINKS[1], "down"),
    }

    def struck(fault: str) -> Row:
        try:
            return _struck(folder, networks, fault, strikes[fault])
        finally:
            inside(networks[1], "ip", "link", "set", LINKS[1], "up")

    names = {fault: f"goes_on_{fault.replace(' ', '_').replace(chr(39), '')}" for fault in strikes}
    return {name: functools.partial(struck, fault) for fault, name in names.items()}


def _struck(folder: Path, networks: Sequence[int], fault: str, strike: Callable[[Nodes], object]) -> Row:
    """Two ranks, of which node 0 can hold both."""
    with Nodes(folder, networks, f"on-{fault}".replace(" ", "-").replace("'", "")) as nodes:
        for node in (0, 1):
            nodes.by_hand(node, "--on-node-loss", "continue")
        wrong = [] if nodes.trial.await_gate() else [f"did not begin: {nodes.text(0)[-500:]}"]
        began = time.monotonic()
        strike(nodes)
        Slurm.wait(lambda: "going on with node 0" in nodes.text(0), END_SECONDS)
        seconds = time.monotonic() - began
        nodes.trial.open()
        wrong += [] if nodes.await_end(0) else ["node 0 had not ended"]
        outcomes = [(r.outcome.status, r.environment.nnodes) for r in nodes.trial.reading().records]
        wrong += [] if outcomes == list(zip(_HAVE, [2, 2, 1, 1], strict=True)) else [f"records: {outcomes}"]
        wrong += [] if nodes.code(0) == 0 else [f"node 0 ended with {nodes.code(0)}: {nodes.text(0)[-500:]}"]
        wrong += [f"{seconds:.0f} s to go on"] if seconds > END_SECONDS else []
    told = "going on with node 0: 3 cases good, 2 on one node"
    fault = f"{fault}, run goes on"
    return Row(engine="by hand", shape=SHAPE, fault=fault, seconds=seconds, told=told, lost="nothing", wrong=wrong)
