"""Mistakes of users on a cluster: each ends at once, with what was got and what to do."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import Slurm
from benchmarks.cluster.trial import BEGIN_SECONDS

_USAGE = 4
"""pytest's exit code for a mistake of its user's, and ours for nodes that cannot come together."""
_SUITES = (
    "pytest",
    "suites/test_throughput.py",
    "--adapters",
    "ddp",
    "--workload",
    "gpt-mini",
    "-p",
    "no:cacheprovider",
)
_ALL_END = "--kill-on-bad-exit=1"


def contradicted(slurm: Slurm) -> Row:
    command = [*_srun(1), *_SUITES, "--nnodes", "3"]
    return _refused(
        slurm, "--nnodes that contradicts SLURM", command, "--nnodes 3, but this command was started as 2 nodes"
    )


def uneven(slurm: Slurm) -> Row:
    command = ["srun", "--nodes=2", "--ntasks=3", *_SUITES]
    return _refused(
        slurm, "tasks that differ between nodes", command, "srun has started 3 tasks on 2 nodes, not as many"
    )


def too_many_tasks(slurm: Slurm) -> Row:
    """Two a node, of two ranks in all."""
    command = [*_srun(2), *_SUITES, "--world", "2"]
    return _refused(slurm, "more tasks than ranks", command, "2 ranks cannot be spread evenly over 4 tasks")


def without_srun(slurm: Slurm) -> Row:
    """In a job of two nodes."""
    command = ["salloc", "--nodes=2", "--quiet", *_SUITES]
    return _refused(slurm, "a job of two nodes without srun", command, "start it with srun --ntasks-per-node=1")


def nobodys_address(slurm: Slurm) -> Row:
    """192.0.2.0/24 is nobody's. That node 0 is not merely late no other node can know: srun ends them."""
    command = [*_srun(1), _ALL_END, *_SUITES, "--rdzv", "192.0.2.1:29500"]
    return _refused(slurm, "--rdzv at an address of no node", command, "node 0 cannot listen at 192.0.2.1:29500")


def port_in_use(slurm: Slurm) -> Row:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        told = f"node 0 cannot listen at {at}: Address already in use"
        return _refused(slurm, "--rdzv at a port in use", [*_srun(1), _ALL_END, *_SUITES, "--rdzv", at], told)


def unknown_nodes(slurm: Slurm) -> Row:
    command = [*_srun(1), "env", "SLURM_STEP_NODELIST=nowhere[1-2]", *_SUITES]
    return _refused(slurm, "node list that nobody knows", command, "node list 'nowhere[1-2]' is not known to scontrol")


def _srun(tasks: int) -> list[str]:
    return ["srun", "--nodes=2", f"--ntasks-per-node={tasks}"]


def _refused(slurm: Slurm, fault: str, command: Sequence[str], words: str) -> Row:
    """Whether every task ended with the exit code of a mistake, and one said so in these words."""
    output, began = slurm.folder / f"{fault.replace(' ', '-')}.out", time.monotonic()
    code = slurm.start(output, *command).wait(BEGIN_SECONDS)
    seconds, said = time.monotonic() - began, output.read_text()
    told = next((line[line.index(words) :] for line in said.splitlines() if words in line), "")
    good = told and (code if _ALL_END in command else code == _USAGE)
    wrong = [] if good else [f"ended with {code}, expected {_USAGE} and {words!r}: {said[-800:]}"]
    return Row(engine="SLURM, mistake", shape="2 nodes, loopback", fault=fault, seconds=seconds, told=told, wrong=wrong)
