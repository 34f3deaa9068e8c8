"""Three nodes in networks of their own, joined by a switch, one by a slow link; and what the doctor says of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.chaos.nodes import inside
from benchmarks.cluster.nodes import Nodes
from benchmarks.cluster.row import Row
from benchmarks.cluster.trial import BEGIN_SECONDS

HOSTS = [f"10.213.8.{node + 1}" for node in range(4)]
_DOCTORED = 3
"""Nodes."""
_SLOW = "tc qdisc add dev {} root tbf rate 400mbit burst 256kbit latency 400ms"


@contextlib.contextmanager
def switched(count: int = _DOCTORED) -> Iterator[list[int]]:
    """Ids of processes in the networks of `count` nodes, and last in that of a switch between them."""
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) for _ in range(count + 1)]
    *nodes, switch = [holder.pid for holder in holders]
    try:
        time.sleep(0.3)
        say(switch, "ip link add switch0 type bridge", "ip link set switch0 up")
        for number, node in enumerate(nodes):
            say(switch, f"ip link add port{number} type veth peer name link{number} netns {node}")
            say(switch, f"ip link set port{number} master switch0", f"ip link set port{number} up")
            say(node, f"ip addr add {HOSTS[number]}/24 dev link{number}", f"ip link set link{number} up")
            say(node, "ip link set lo up")
        yield [*nodes, switch]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def say(network: int, *commands: str) -> None:
    for command in commands:
        inside(network, *command.split())


def doctors(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name."""
    return {"doctor_finds": lambda: _doctor_finds(folder)}


def _doctor_finds(folder: Path) -> Row:
    """Node 2's link, both ways."""
    with switched() as networks, Nodes(folder, networks[:-1], "doctor") as nodes:
        say(networks[2], _SLOW.format("link2"))
        say(networks[-1], _SLOW.format("port2"))
        command = [sys.executable, "-m", "meshmark", "doctor", "--cluster", "--nnodes=3", f"--rdzv={HOSTS[0]}:29500"]
        began = time.monotonic()
        outputs = [folder / f"doctor-{node}" for node in range(3)]
        running = [nodes.start(n, outputs[n], [*command, f"--node-rank={n}"]) for n in range(3)]
        codes = [process.wait(BEGIN_SECONDS) for process in running]
        seconds = time.monotonic() - began
        said = outputs[0].read_text()
    odd = [line.strip() for line in said.partition("odd ones:")[2].splitlines() if line.strip()]
    expected = ["node 2 sends slowly, to any other", "node 2 receives slowly, from any other"]
    wrong = [f"expected {expected} alone: {said}"] if [line.partition(":")[0] for line in odd] != expected else []
    wrong += [f"ended with {codes}, expected 1 each"] if codes != [1, 1, 1] else []
    shape, fault = "3 x 1 x 1, networks", "node 2's link of 400 Mbit/s"
    return Row(engine="meshmark doctor", shape=shape, fault=fault, seconds=seconds, told="; ".join(odd), wrong=wrong)
