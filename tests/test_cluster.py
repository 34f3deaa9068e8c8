"""Two nodes on one machine: the same command on each, one rendezvous a case, the same record on both."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshmark.errors import ClusterError, InputError
from meshmark.run import cluster
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.record_file import read_records

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def two_nodes(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of each node."""
    running = start_nodes(folder, *arguments)
    outputs = [process.communicate(timeout=240)[0] for process in running]
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]


def start_nodes(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    rdzv = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "suites",
                "--nnodes",
                "2",
                "--node-rank",
                str(node),
                "--rdzv",
                rdzv,
                "--results",
                str(folder / str(node)),
                "-p",
                "no:cacheprovider",
                *arguments,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for node in range(2)
    ]


def test_both_nodes_pass_and_node_0_writes(tmp_path: Path) -> None:
    for code, output in two_nodes(tmp_path, "--adapters", "ddp", "--workload", "gpt-mini"):
        assert code == 0, output
    observed, timed = read_records(tmp_path / "0").records
    assert observed.environment.nnodes == 2
    assert len(observed.memory.readings) == 2 and len(timed.timing.rank_step_seconds) == 2
    assert not (tmp_path / "1" / "records.jsonl").exists()


def test_a_failure_on_one_node_is_the_same_outcome_on_both(tmp_path: Path) -> None:
    target = ROOT / "tests" / "broken" / "outcomes.py"
    raising = ("--adapter", f"{target}:Raises", "--workload", "gpt-mini", "-k", "throughput")
    for code, output in two_nodes(tmp_path, *raising):
        assert code == 1
        assert "raised on rank 1: ArithmeticError: planted in step 3" in output


@pytest.mark.parametrize(
    "lost, happens, told",
    [
        (1, signal.SIGKILL, r"node 1 of 2 has given no sign of life for 15 s"),
        (1, signal.SIGSTOP, r"node 1 of 2 has given no sign of life for 15 s"),
        (0, signal.SIGKILL, r"node 0's store at 127.0.0.1:\d+ (has closed|does not answer)"),
        (0, signal.SIGSTOP, r"node 0's store at 127.0.0.1:\d+ does not answer"),
    ],
)
def test_a_node_that_is_lost_ends_the_other_within_half_a_minute(
    tmp_path: Path, lost: int, happens: signal.Signals, told: str
) -> None:
    target = ROOT / "tests" / "broken" / "outcomes.py"
    environment = {**os.environ, "MESHMARK_TEST_HANGS": str(tmp_path / "hangs")}
    nodes = start_nodes(
        tmp_path, "--adapter", f"{target}:Hangs", "-k", "throughput", "--workload", "gpt-mini", environment=environment
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        nodes[lost].send_signal(happens)
        output, _ = nodes[1 - lost].communicate(timeout=30)
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert nodes[1 - lost].returncode == pytest.ExitCode.USAGE_ERROR, output
    assert re.search(told, output), output


def test_a_wait_for_nodes_is_told_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody there, somebody else there, and only node 0 there."""
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "a secret of this test")
    monkeypatch.setattr(cluster, "_JOIN_SECONDS", 3)
    monkeypatch.setattr(cluster, "_SAY_SECONDS", 1.0)
    monkeypatch.setattr("meshmark.run.store._PROVE_SECONDS", 2.0)
    said: list[str] = []
    rdzv = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=f"node 1 of 2 found no store at {rdzv} within 3 s: is node 0 running"):
        Cluster(ClusterSpec(nnodes=2, node_rank=1, rdzv=rdzv), said.append).__enter__()
    assert re.match(f"waiting for node 0 of 2 at {rdzv}, [12] s of 3", said[0])
    with pytest.raises(ClusterError, match="node 1 of 2 did not answer within 3 s at 'join'"):
        Cluster(ClusterSpec(nnodes=2, node_rank=0, rdzv=rdzv), said.append).__enter__()
    assert re.fullmatch("waiting for node 1 of 2 at 'join', [23] s of 3", said[-1])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        spec = ClusterSpec(nnodes=2, node_rank=1, rdzv=f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ClusterError, match="what listens at .* is not this run's store"):
            Cluster(spec).__enter__()
        assert 2 <= time.monotonic() - started < 12


def test_the_environment_of_torchrun_and_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {
        "GROUP_RANK": "1",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
    }
    assert ClusterSpec.detect(torchrun) == ClusterSpec(nnodes=2, node_rank=1, rdzv="a:29501")
    scontrol = tmp_path / "scontrol"  # SLURM's own tool expands the list of hosts
    scontrol.write_text("#!/bin/sh\nprintf 'node1\\nnode2\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm = {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node[1-2]",
    }
    assert ClusterSpec.detect(slurm) == ClusterSpec(nnodes=2, node_rank=1, rdzv="node1:20007")
    assert ClusterSpec.detect({}) == ClusterSpec()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nnodes": 2}, "needs --rdzv"),
        ({"nnodes": 2, "node_rank": 2, "rdzv": "a:1"}, "expected 0 to 1"),
        ({"nnodes": 2, "rdzv": "a"}, "expected HOST:PORT"),
    ],
)
def test_numbers_that_contradict_each_other(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ClusterSpec(**wrong)  # type: ignore[arg-type]
