"""What slows nodes down, or starts them otherwise, and must change nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.nodes import HOSTS, LINKS, inside
from benchmarks.cluster.nodes import SHAPE, Nodes
from benchmarks.cluster.row import Row

_LATE_SECONDS = 60.0
_C10D = ("--rdzv-backend=c10d", "--rdzv-id=cluster-test", f"--rdzv-endpoint={HOSTS[0]}:29600")
Start = Callable[[Nodes], object]


def harmless(folder: Path, networks: Sequence[int]) -> Iterator[Row]:
    """Every case must be correct."""

    def hand(nodes: Nodes, late: float = 0.0) -> None:
        nodes.by_hand(0)
        time.sleep(late)
        nodes.by_hand(1)

    def c10d(nodes: Nodes) -> None:
        for node in (0, 1):
            nodes.by_torchrun(node, 1, *_C10D, f"--rdzv-conf=is_host={'false' if node else 'true'}")

    def static(nodes: Nodes) -> None:
        for node in (0, 1):
            nodes.by_torchrun(node, 1, f"--node-rank={node}", f"--master-addr={HOSTS[0]}", "--master-port=29600")

    yield _whole(Nodes(folder, networks, "plain"), hand, "none")
    yield _whole(Nodes(folder, networks, "late"), lambda nodes: hand(nodes, _LATE_SECONDS), "node 1 a minute late")
    yield _whole(Nodes(folder, networks, "c10d"), c10d, "none", "torchrun, c10d")
    yield _whole(Nodes(folder, networks, "static"), static, "none", "torchrun, static")
    slow = "tc qdisc {} dev LINK root tbf rate 20mbit burst 32kbit latency 400ms"
    with _shaped(networks, slow.format("add"), slow.format("del")):
        yield _whole(Nodes(folder, networks, "slow"), hand, "link of 20 Mbit/s")
    lossy = "iptables {} INPUT -i LINK -m statistic --mode random --probability 0.01 -j DROP"
    with _shaped(networks, lossy.format("-A"), lossy.format("-D")):
        yield _whole(Nodes(folder, networks, "lossy"), hand, "link that loses 1 % of packets")


@contextmanager
def _shaped(networks: Sequence[int], add: str, delete: str) -> Iterator[None]:
    """Commands on both ends of the link, by the name LINK in them."""

    def say(command: str) -> None:
        for network, link in zip(networks, LINKS, strict=True):
            inside(network, *command.replace("LINK", link).split())

    say(add)
    try:
        yield
    finally:
        say(delete)


def _whole(nodes: Nodes, start: Start, fault: str, engine: str = "by hand") -> Row:
    with nodes:
        nodes.trial.open()
        began = time.monotonic()
        start(nodes)
        wrong = [f"node {node} had not ended" for node in (0, 1) if not nodes.await_end(node)]
        seconds = time.monotonic() - began
        for node in (0, 1):
            if nodes.code(node):
                wrong.append(f"node {node} ended with {nodes.code(node)}: {nodes.text(node)[-500:]}")
        wrong += nodes.trial.complaints()
    return Row(engine=engine, shape=SHAPE, fault=fault, seconds=seconds, told="3 cases correct", wrong=wrong)
