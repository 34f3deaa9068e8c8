"""`meshmark doctor --cluster`: two nodes on this machine; what is odd, on rates that are drawn."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from meshmark.cli.cluster_doctor import NodeFacts, comparison, infiniband, of_links
from meshmark.cli.commands import main
from meshmark.measure.links import Link, odd_ones, rounds
from tests.test_cluster import ROOT, free_port


def draw(nodes: int, slow: dict[tuple[int, int], float], scatter: float = 0.05, seed: int = 0) -> list[Link]:
    """1 GB/s each way, but for those that are so many times slower; each go scatters anew, and each transfer."""
    drawn = random.Random(seed)

    def seconds(ends: tuple[int, int]) -> list[float]:
        middle = 0.01 * slow.get(ends, 1.0) * math.exp(drawn.gauss(0, scatter))
        return [middle * math.exp(drawn.gauss(0, scatter)) for _ in range(7)]

    return [
        Link(source=a, target=b, go=go, num_bytes=10**7, seconds=seconds((a, b)))
        for go in range(2)
        for a, b in permutations(range(nodes), 2)
    ]


def who(links: list[Link]) -> list[str]:
    return [one.who for one in odd_ones(links)]


@pytest.mark.parametrize("nodes", [3, 4, 16])
def test_the_odd_one_is_named(nodes: int) -> None:
    """A node that sends slowly, one that does both slowly, and one link of nodes that are well; and of two slow at
    once both."""
    out, into = "node 1 sends slowly, to any other", "node 1 receives slowly, from any other"
    sends = {(1, b): 4.0 for b in range(nodes)}
    takes = {(a, 1): 4.0 for a in range(nodes)}
    assert who(draw(nodes, sends)) == [out]
    assert who(draw(nodes, takes)) == [into]
    assert who(draw(nodes, sends | takes)) == [out, into]
    assert who(draw(nodes, {(1, 2): 4.0})) == ["from node 1 to node 2"]
    (told,) = odd_ones(draw(nodes, {(1, 2): 4.0}))
    assert 3.5 < told.usual / told.rate < 4.5 and re.search(
        r"0\.2\d+ GB/s, where .* is usual \(.* times slower\)", f"{told}"
    )


def test_what_is_well_or_slow_by_chance_is_not_odd() -> None:
    """In less than one of a hundred clusters, also where links scatter by a sixth; and of two nodes none is."""
    alarms = [
        bool(who(draw(nodes, {}, scatter, seed))) for nodes in (3, 8) for scatter in (0.02, 0.15) for seed in range(100)
    ]
    assert sum(alarms) <= 4
    once = [link for link in draw(4, {(1, 2): 4.0}) if link.go == 0] + [link for link in draw(4, {}) if link.go == 1]
    assert who(once) == []
    assert who(draw(2, {(0, 1): 4.0})) == []
    assert "two nodes have one link" in of_links(draw(2, {}))[-1]


@pytest.mark.parametrize("nodes", [2, 3, 8, 9])
def test_every_pair_meets_once_and_no_node_twice_a_round(nodes: int) -> None:
    played = rounds(nodes)
    assert len(played) == nodes - 1 + nodes % 2
    pairs = [frozenset(pair) for pairs in played for pair in pairs]
    assert len(pairs) == len(set(pairs)) == nodes * (nodes - 1) // 2
    for ones in played:
        assert len({node for pair in ones for node in pair}) == 2 * len(ones)


def test_what_differs_is_told_first_and_the_fewest_last(tmp_path: Path) -> None:
    drivers = ["550.1", "550.1", "535.2", "550.1"]
    nodes = [
        NodeFacts(
            host=f"host{n}", num_gpus=8, alike={"GPU driver": driver, "memory": "2 GiB"}, devices=["ib0 400 Gbit/s"]
        )
        for n, driver in enumerate(drivers)
    ]
    lines = comparison(nodes)
    assert lines[:2] == ["4 nodes, which differ in", "  GPU driver: 550.1 on nodes 0-1, 3; 535.2 on node 2"]
    assert lines[2:4] == ["all have", "  memory: 2 GiB"] and lines[-1] == "  3: host3; ib0 400 Gbit/s"
    assert comparison(nodes[:2])[0] == "2 nodes, alike in all of this"
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("100 Gb/sec (2X HDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert infiniband(tmp_path) == ["mlx5_0:1 100 Gb/sec (2X HDR) 4: active"]
    assert of_links(draw(17, {}))[0].startswith("links: 272, ")


@pytest.mark.slow
def test_two_nodes_of_which_one_holds_another_version(tmp_path: Path) -> None:
    """They are compared and measured all the same; node 0 tells, and both say by their exit code that they differ."""
    fake = tmp_path / "accelerate-99.0.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 99.0\n")
    command = [sys.executable, "-m", "meshmark", "doctor", "--cluster", "--nnodes", "2"]
    rdzv = f"127.0.0.1:{free_port()}"
    running = [
        subprocess.Popen(
            [*command, "--rdzv", rdzv, "--node-rank", str(node)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for node, path in enumerate([str(ROOT), f"{tmp_path}:{ROOT}"])
    ]
    (said, other) = (process.communicate(timeout=120)[0] for process in running)
    assert [process.returncode for process in running] == [1, 1], said + other
    assert said.startswith("2 nodes, which differ in\n  version of accelerate: "), said
    assert "99.0 on node 1" in said.splitlines()[1] and other == ""
    assert re.search(r"\nall-reduce of 4 MiB over 2 ranks \(cpu\): [\d.]+ ms, [\d.]+ GB/s of bus\n", said)
    assert re.search(r"\n +0 +- +[\d.]+\n +1 +[\d.]+ +-\n", said), said


def test_one_node_has_nothing_to_be_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster"]) == 2
    assert "start it on each, as srun -N2 --ntasks-per-node=1 meshmark doctor --cluster does" in capsys.readouterr().err
