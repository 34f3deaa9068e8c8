"""Two nodes on one machine, each in a network of its own, and what happens to one of them or to the link between."""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.session import ROOT, Session
from benchmarks.chaos.settings import PLAIN, Setting
from meshmark.records.record import Status

_CASES = 6
HOSTS = ("10.213.7.1", "10.213.7.2")
LINKS = ("chaos0", "chaos1")
PORT = 29500


@dataclass(kw_only=True)
class NodeStruck(Fault):
    """A fault of a whole node, described by `what`."""

    what: str
    ends_session = True

    @property
    def survivors(self) -> list[int]:
        return {"node 1 killed": [0], "node 0 killed": [1]}.get(self.what, [0, 1])


@contextlib.contextmanager
def two_networks() -> Iterator[list[int]]:
    """Ids of two processes, each in a network that is joined to the other's by one link."""
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) for _ in HOSTS]
    try:
        time.sleep(0.3)
        _run("ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for holder, host, link in zip(holders, HOSTS, LINKS, strict=True):
            _run("ip", "link", "set", link, "netns", str(holder.pid))
            for command in (
                ["addr", "add", f"{host}/24", "dev", link],
                ["link", "set", link, "up"],
                ["link", "set", "lo", "up"],
            ):
                inside(holder.pid, "ip", *command)
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def enter(network: int) -> list[str]:
    """Return the first words of a command that is to run there."""
    return ["nsenter", f"--net=/proc/{network}/ns/net"]


def inside(network: int, *command: str) -> None:
    _run(*enter(network), *command)


def run_nodes(
    folder: Path, fault: NodeStruck, draw: random.Random, setting: Setting = PLAIN
) -> tuple[float, list[str]]:
    """Return the seconds until both nodes had ended, and what was wrong."""
    with two_networks() as networks:
        nodes = _start(folder, networks, setting)
        try:
            if "stranger" in fault.what:
                return _meet_stranger(folder, nodes, networks, fault, draw)
            return _strike(nodes, networks, fault, draw)
        finally:
            for node in nodes:
                node.end()


def _start(folder: Path, networks: Sequence[int], setting: Setting) -> list[Session]:
    secret, nodes = secrets.token_hex(16), []
    for rank, (network, link) in enumerate(zip(networks, LINKS, strict=True)):
        which = ["--nnodes", "2", "--node-rank", str(rank), "--rdzv", f"{HOSTS[0]}:{PORT}"]
        node = Session(folder / f"node{rank}", [f"ddp_{i}" for i in range(_CASES)], *which, setting=setting)
        node.start(enter(network), GLOO_SOCKET_IFNAME=link, MESHMARK_RDZV_SECRET=secret)
        nodes.append(node)
    return nodes


def _strike(
    nodes: Sequence[Session], networks: Sequence[int], fault: NodeStruck, draw: random.Random
) -> tuple[float, list[str]]:
    name = nodes[0].names[draw.randrange(1, _CASES - 1)]
    for node in nodes:
        if not node.wait(lambda node=node: name in node.begun(), 120):  # type: ignore[misc]
            return 0.0, [f"{name} did not begin: {node.output()[-600:]}"]
    time.sleep(draw.uniform(0.0, PLAIN.spread_seconds))
    fault.struck = time.monotonic()
    if fault.what == "link cut":
        inside(networks[1], "ip", "link", "set", LINKS[1], "down")
    elif fault.what == "node 1 stopped":
        for pid in processes.marked(nodes[1].mark):
            processes.send(pid, signal.SIGSTOP)
    else:
        processes.send(nodes[fault.what == "node 1 killed"].pid, signal.SIGKILL)
    limit = nodes[0].latest_seconds
    wrong = [] if nodes[0].await_end(limit) else [f"node 0 had not ended after {limit:.0f} s"]
    if fault.what == "node 1 stopped":
        for pid in processes.marked(nodes[1].mark):
            processes.send(pid, signal.SIGCONT)
    wrong += [] if nodes[1].await_end(limit) else [f"node 1 had not ended after {limit:.0f} s"]
    seconds = time.monotonic() - fault.struck
    return seconds, [*wrong, *_misnamed(nodes, fault, name)]


def _meet_stranger(
    folder: Path, nodes: Sequence[Session], networks: Sequence[int], fault: NodeStruck, draw: random.Random
) -> tuple[float, list[str]]:
    """Let somebody without the secret reach node 0's port. Both nodes must complete all cases."""
    time.sleep(draw.uniform(0.0, 8.0))
    fault.struck = time.monotonic()
    if "secret" in fault.what:
        options = ["--nnodes", "2", "--node-rank", "1", "--rdzv", f"{HOSTS[0]}:{PORT}"]
        stranger = Session(folder / "stranger", ["ddp_0"], *options)
        stranger.start(enter(networks[1]), GLOO_SOCKET_IFNAME=LINKS[1], MESHMARK_RDZV_SECRET=secrets.token_hex(16))
        command = stranger.process
    else:
        how = "flood" if "flood" in fault.what else "drip"
        program = [sys.executable, "-m", "benchmarks.chaos.strangers", HOSTS[0], str(PORT), how]
        command = subprocess.Popen([*enter(networks[1]), *program], cwd=ROOT)
        stranger = None
    limit = 120.0 + _CASES * nodes[0].limit_seconds
    wrong = [f"node {rank} had not ended" for rank, node in enumerate(nodes) if not node.await_end(limit)]
    seconds = time.monotonic() - fault.struck
    if stranger:
        if not stranger.await_end(PLAIN.patience_seconds):
            wrong.append("the stranger's own command had not ended")
        elif stranger.process and stranger.process.returncode != 4:
            wrong.append(f"the stranger's command ended with {stranger.process.returncode}: {stranger.output()[-300:]}")
        stranger.end()
    elif command:
        command.kill()
        command.wait()
    for rank, node in enumerate(nodes):
        if node.process and node.process.returncode != 0:
            wrong.append(f"node {rank} ended with {node.process.returncode}: {node.output()[-500:]}")
    correct = [record for record in nodes[0].reading().records if record.outcome.status is Status.OK]
    if len(correct) != _CASES:
        wrong.append(f"{len(correct)} of {_CASES} cases are ok")
    return seconds, wrong


def _misnamed(nodes: Sequence[Session], fault: NodeStruck, name: str) -> list[str]:
    wrong = []
    for rank in fault.survivors:
        node = nodes[rank]
        code = node.process.returncode if node.process else None
        if code != 4 or "node" not in node.output().rpartition("Exit")[2]:
            wrong.append(f"node {rank} ended with {code}: {node.output()[-500:]}")
    records = {record.adapter.rpartition(":")[2]: record for record in nodes[0].reading().records}
    earlier = nodes[0].begun()[: nodes[0].begun().index(name)]
    wrong += [f"{case} was {records[case].outcome.status}" for case in earlier if records[case].outcome.status != "ok"]
    if 0 in fault.survivors:
        last = records[nodes[0].begun()[-1]].outcome
        if last.status is not Status.NODE_LOST:
            wrong.append(f"expected node lost, got {last.status} of rank {last.rank}: {last.message[:300]!r}")
    left = [path.name for node in nodes for path in node.temporary.glob("meshmark-*")]
    return wrong + ([f"left temporary files {left}"] if left else [])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
