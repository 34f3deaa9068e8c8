"""A node, or the link to it, that is gone while a case runs."""

from __future__ import annotations

import functools
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos.nodes import HOSTS, LINKS, inside
from benchmarks.cluster.nodes import SHAPE, Nodes
from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import ROOT
from benchmarks.cluster.trial import BEGIN_SECONDS, END_SECONDS
from meshmark.records.record import Status

_NOTICE_SECONDS = 30.0
_NOWHERE = "02:00:00:00:00:01"
"""A hardware address that nobody has: what is sent there is gone without a word."""


def node_losses(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name."""
    strikes: dict[str, tuple[Callable[[Nodes], object], tuple[int, ...]]] = {
        "node 1's processes killed": (lambda nodes: nodes.send(1, signal.SIGKILL), (0,)),
        "node 0's processes killed": (lambda nodes: nodes.send(0, signal.SIGKILL), (1,)),
        "node 1 frozen": (lambda nodes: nodes.send(1, signal.SIGSTOP), (0,)),
        "link down": (lambda nodes: inside(networks[1], "ip", "link", "set", LINKS[1], "down"), (0, 1)),
        "link cut from node 1 to node 0": (lambda nodes: _misdirect(networks, 1), (0, 1)),
        "link cut from node 0 to node 1": (lambda nodes: _misdirect(networks, 0), (0, 1)),
    }

    def struck(fault: str) -> Row:
        try:
            return _struck(folder, networks, fault, *strikes[fault])
        finally:
            _mend(networks)

    return {fault.replace(" ", "_").replace("'", ""): functools.partial(struck, fault) for fault in strikes}


def _misdirect(networks: Sequence[int], node: int) -> None:
    told = ("ip", "neigh", "replace", HOSTS[1 - node], "lladdr", _NOWHERE, "dev", LINKS[node], "nud", "permanent")
    inside(networks[node], *told)


def _mend(networks: Sequence[int]) -> None:
    for node in (0, 1):
        inside(networks[node], "ip", "link", "set", LINKS[node], "up")
        inside(networks[node], "ip", "neigh", "flush", "all", "nud", "permanent")


def _struck(
    folder: Path,
    networks: Sequence[int],
    fault: str,
    strike: Callable[[Nodes], object],
    survivors: Sequence[int],
) -> Row:
    with Nodes(folder, networks, fault.replace(" ", "-").replace("'", "")) as nodes:
        for node in (0, 1):
            nodes.by_hand(node)
        wrong = [] if nodes.trial.await_gate() else [f"did not begin: {nodes.text(0)[-500:]}"]
        began = time.monotonic()
        strike(nodes)
        for node in survivors:
            ended = nodes.await_end(node, END_SECONDS)
            wrong += [] if ended else [f"node {node} had not ended after {END_SECONDS:.0f} s"]
        seconds = time.monotonic() - began
        wrong += [f"{seconds:.0f} s to notice"] if seconds > _NOTICE_SECONDS else []
        for node in survivors:
            if nodes.code(node) != 4 or "node" not in nodes.text(node).rpartition("Exit")[2]:
                wrong.append(f"node {node} ended with {nodes.code(node)}: {nodes.text(node)[-500:]}")
        records = nodes.trial.reading().records
        first = records[0].outcome.status if records else None
        wrong += [] if first is Status.OK else [f"the case before is {first}"]
        told = "exit code 4, naming node 0's store"
        if 0 in survivors:
            last = records[-1].outcome
            told = f"{last.status}: {last.message}"
            wrong += [] if last.status is Status.NODE_LOST else [f"expected node lost, got {told}"]
    kept = "nothing" if first is Status.OK else "the case before"
    return Row(engine="by hand", shape=SHAPE, fault=fault, seconds=seconds, told=told, lost=kept, wrong=wrong)


def unlike(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name, nodes that were given other things: the run ends before a rank starts, and both say why."""
    steps = "request's steps (3 on node 0, 4 on node 1)"

    def version() -> Row:
        fake = folder / "packages" / "accelerate-99.0.dist-info"
        fake.mkdir(parents=True)
        (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 99.0\n")
        elsewhere = f"{fake.parent}:{ROOT}"
        return _disagree(folder, networks, "other version on node 1", "99.0 on node 1", [], PYTHONPATH=elsewhere)

    return {
        "command_line": lambda: _disagree(folder, networks, "other command line on node 1", steps, ["--steps", "4"]),
        "version": version,
    }


def _disagree(
    folder: Path, networks: Sequence[int], fault: str, words: str, options: Sequence[str], **environment: str
) -> Row:
    with Nodes(folder, networks, fault.replace(" ", "-")) as nodes:
        nodes.trial.open()
        began = time.monotonic()
        nodes.by_hand(0)
        nodes.by_hand(1, *options, **environment)
        wrong = [f"node {node} had not ended" for node in (0, 1) if not nodes.await_end(node)]
        seconds = time.monotonic() - began
        for node in (0, 1):
            if nodes.code(node) != 4 or words not in nodes.text(node):
                wrong.append(f"node {node} ended with {nodes.code(node)}: {nodes.text(node)[-500:]}")
        last = nodes.trial.reading().records[-1].outcome
        wrong += [] if last.status is Status.NODES_DISAGREE else [f"got {last.status}: {last.message}"]
    told = last.message.partition(":")[0]
    return Row(engine="by hand", shape=SHAPE, fault=fault, seconds=seconds, told=told, wrong=wrong)


def full(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name."""
    return {
        "full_disk": lambda: _full_disk(folder, networks),
        "unshared_folder": lambda: _unshared(folder, networks),
    }


def _unshared(folder: Path, networks: Sequence[int]) -> Row:
    """Node 1 does not see node 0's results: what saves and loads is skipped, and says why; all else is judged."""
    with Nodes(folder, networks, "unshared") as nodes:
        began = time.monotonic()
        chosen = ["pytest", "suites/test_conformance.py", "--adapters", "ddp", "-k", "resume or clipping"]
        common = ["--nnodes", "2", "--rdzv", f"{HOSTS[0]}:29500", "--time-limit", "900", "-p", "no:cacheprovider"]
        running = [
            nodes.start(
                n, nodes.output(n), [*chosen, *common, "--node-rank", str(n), "--results", str(nodes.results(n))]
            )
            for n in (0, 1)
        ]
        codes = [process.wait(BEGIN_SECONDS) for process in running]
        seconds = time.monotonic() - began
        outcomes = {record.conformance.scenario: record.outcome for record in nodes.trial.reading().records}
        wrong = [f"ended with {codes}: {nodes.text(0)[-500:]}"] if codes != [0, 0] else []
        skipped = {name: o for name, o in outcomes.items() if o.status is Status.SKIPPED}
        reasons = {outcome.message for outcome in skipped.values()}
        if not (reasons and all(reason.startswith("node 1 does not see node 0's results") for reason in reasons)):
            wrong.append(f"expected what saves to be skipped with its reason: {outcomes}")
        if not any(outcome.status is Status.OK for outcome in outcomes.values()):
            wrong.append(f"nothing else was judged: {outcomes}")
    told = f"{len(skipped)} scenarios skipped, {'; '.join(reasons)}"
    return Row(
        engine="by hand", shape=SHAPE, fault="folder that only node 0 sees", seconds=seconds, told=told, wrong=wrong
    )


def _full_disk(folder: Path, networks: Sequence[int]) -> Row:
    """Fill the disk that holds node 1's temporary files."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        with Nodes(folder, networks, "full-disk") as nodes:
            nodes.trial.open()
            began = time.monotonic()
            nodes.by_hand(0)
            nodes.by_hand(1, TMPDIR=str(disk))
            wrong = [f"node {node} had not ended" for node in (0, 1) if not nodes.await_end(node)]
            seconds = time.monotonic() - began
            outcomes = [record.outcome for record in nodes.trial.reading().records]
            for outcome in outcomes:
                if outcome.status is not Status.NO_SPACE or not outcome.message.startswith("node 1: "):
                    wrong.append(f"expected no space on node 1, got {outcome.status}: {outcome.message}")
            wrong += [] if len(outcomes) == 3 else [f"{len(outcomes)} records of 3 cases: {nodes.text(0)[-500:]}"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    told = f"{outcomes[0].status}: {outcomes[0].message}" if outcomes else ""
    return Row(engine="by hand", shape=SHAPE, fault="full disk on node 1", seconds=seconds, told=told, wrong=wrong)
