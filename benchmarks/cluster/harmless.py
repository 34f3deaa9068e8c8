"""Events that slow nodes down, or start them otherwise, and must change nothing."""

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


def harmless(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name. Every case must be correct."""

    def hand(nodes: Nodes, late: float = 0.0) -> None:
        nodes.by_hand(0)
        time.sleep(late)
        nodes.by_hand(1)

    def behind(nodes: Nodes) -> None:
        nodes.by_hand(0)
        nodes.by_hand(1, prefix=["faketime", "-f", "-1h"])

    def c10d(nodes: Nodes) -> None:
        for node in (0, 1):
            nodes.by_torchrun(node, 1, *_C10D, f"--rdzv-conf=is_host={'false' if node else 'true'}")

    def static(nodes: Nodes) -> None:
        for node in (0, 1):
            nodes.by_torchrun(node, 1, f"--node-rank={node}", f"--master-addr={HOSTS[0]}", "--master-port=29600")

    def whole(name: str, start: Start, fault: str, engine: str = "by hand") -> Row:
        return _whole(Nodes(folder, networks, name), start, fault, engine)

    def shaped(command: str, add: str, delete: str, name: str, fault: str) -> Row:
        with _shaped(networks, command.format(add), command.format(delete)):
            return whole(name, hand, fault)

    slow = "tc qdisc {} dev LINK root tbf rate 20mbit burst 32kbit latency 400ms"
    lossy = "iptables {} INPUT -i LINK -m statistic --mode random --probability 0.01 -j DROP"
    return {
        "plain": lambda: whole("plain", hand, "none"),
        "late": lambda: whole("late", lambda nodes: hand(nodes, _LATE_SECONDS), "node 1 a minute late"),
        "clocks": lambda: whole("clocks", behind, "node 1's clock an hour behind"),
        "c10d": lambda: whole("c10d", c10d, "none", "torchrun, c10d"),
        "static": lambda: whole("static", static, "none", "torchrun, static"),
        "slow_link": lambda: shaped(slow, "add", "del", "slow", "link of 20 Mbit/s"),
        "lossy_link": lambda: shaped(lossy, "-A", "-D", "lossy", "link that loses 1 % of packets"),
    }


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
