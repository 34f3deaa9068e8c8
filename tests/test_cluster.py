"""Two nodes on one machine: the same command on each, one rendezvous a case, the same record on both."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshmark.errors import InputError
from meshmark.run.cluster import ClusterSpec
from meshmark.run.record import read_records

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def two_nodes(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of each node."""
    rdzv = f"127.0.0.1:{free_port()}"
    running = [
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
        )
        for node in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]


def test_both_nodes_pass_and_node_0_writes(tmp_path: Path) -> None:
    for code, output in two_nodes(tmp_path, "--adapters", "ddp"):
        assert code == 0, output
    observed, timed = read_records(tmp_path / "0").records
    assert observed.environment.nnodes == 2
    assert len(observed.memory) == 2 and len(timed.rank_step_seconds) == 2
    assert not (tmp_path / "1" / "records.jsonl").exists()


def test_a_failure_on_one_node_is_the_same_outcome_on_both(tmp_path: Path) -> None:
    target = ROOT / "tests" / "broken" / "outcomes.py"
    for code, output in two_nodes(tmp_path, "--adapter", f"{target}:Raises", "-k", "throughput"):
        assert code == 1
        assert "raised on rank 1: ArithmeticError: planted in step 3" in output


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
