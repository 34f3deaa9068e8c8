"""Facts that a scheduler gives this process: which of a run's launchers it is, and where the first of them listens.

A launcher is either a node's only process, or one of the tasks that `srun` or `torchrun` starts on it. Both shapes run
the same ranks. In the second shape each task has a share of them.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
from collections.abc import Mapping

from meshmark.errors import InputError
from meshmark.launch.cluster import ClusterSpec

_PORTS = 20000
"""Ports from here on, and so many, are taken for jobs of SLURM."""
_STEP_APART = 4999
"""So that steps of one job, and jobs that follow each other, have ports of their own."""


def cluster_of(
    environ: Mapping[str, str], *, nnodes: int | None = None, node_rank: int | None = None, rdzv: str | None = None
) -> ClusterSpec:
    """From torchrun's or SLURM's variables, and from what was given by hand; a single node when there is neither.

    Raises `InputError` where they contradict each other.
    """
    told = _of_torchrun(environ) or _of_slurm(environ)
    if told is None:
        if nnodes is None:
            _expect_srun(environ)
        return ClusterSpec(nnodes=nnodes or 1, node_rank=node_rank or 0, rdzv=rdzv)
    if nnodes not in (None, told.nnodes, told.num_hosts):
        raise InputError(
            f"--nnodes {nnodes}, but this command was started as {told.text}: leave --nnodes out, or start it on "
            f"{nnodes} nodes"
        )
    if node_rank not in (None, told.node_rank):
        raise InputError(f"--node-rank {node_rank}, but this command was started as number {told.node_rank}: leave it")
    return dataclasses.replace(told, rdzv=rdzv or told.rdzv)


def _of_torchrun(environ: Mapping[str, str]) -> ClusterSpec | None:
    if not ("GROUP_RANK" in environ and "LOCAL_WORLD_SIZE" in environ):
        return None
    nnodes, each = _whole(environ, "WORLD_SIZE", 1), _whole(environ, "LOCAL_WORLD_SIZE", 1)
    if nnodes == 1:
        return None
    port = _whole(environ, "MASTER_PORT", 1) + 1  # torchrun's own store listens on MASTER_PORT
    return ClusterSpec(
        nnodes=nnodes,
        node_rank=_whole(environ, "RANK", 0),
        rdzv=f"{_required_variable(environ, 'MASTER_ADDR')}:{port}",
        tasks_per_node=_even("torchrun", nnodes, nnodes // each or 1, each),
        local_task=_whole(environ, "LOCAL_RANK", 0),
        host_number=_whole(environ, "GROUP_RANK", 0),
    )


def _of_slurm(environ: Mapping[str, str]) -> ClusterSpec | None:
    if "SLURM_STEP_NUM_NODES" not in environ:
        return None
    hosts = _whole(environ, "SLURM_STEP_NUM_NODES", 1)
    tasks = _whole(environ, "SLURM_STEP_NUM_TASKS", 1)
    if tasks == 1:
        return None
    step = environ.get("SLURM_STEP_ID", "0")
    number = _whole(environ, "SLURM_JOB_ID", 0) + _STEP_APART * (int(step) if step.isdecimal() and len(step) < 9 else 0)
    host = "127.0.0.1" if hosts == 1 else _first_host(_required_variable(environ, "SLURM_STEP_NODELIST"))
    return ClusterSpec(
        nnodes=tasks,
        node_rank=_whole(environ, "SLURM_PROCID", 0),
        rdzv=f"{host}:{_PORTS + number % _PORTS}",
        tasks_per_node=_even("srun", tasks, hosts, _tasks_here(environ, tasks // hosts)),
        local_task=_whole(environ, "SLURM_LOCALID", 0),
        gpus_by_task=any(name in environ for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")),
        host_number=_whole(environ, "SLURM_NODEID", 0) if "SLURM_NODEID" in environ else None,
        switch=_switch(environ),
    )


def _switch(environ: Mapping[str, str]) -> str:
    """As SLURM's topology says (`top.leaf.node`, by the pattern `switch.switch.node`); empty where it knows none."""
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count("switch")
    return ".".join(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:levels])


def _tasks_here(environ: Mapping[str, str], default: int) -> int:
    """The number of tasks on every node, where SLURM says so with one number (`2(x4)`)."""
    said = re.fullmatch(r"(\d{1,5})(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", str(default)))
    return int(said[1]) if said else 0


def _even(starter: str, tasks: int, hosts: int, each: int) -> int:
    """Tasks a node. Raises `InputError` unless every node has as many."""
    if not each or hosts * each != tasks:
        raise InputError(
            f"{starter} has started {tasks} tasks on {hosts} nodes, not as many on each: give every node one task, or "
            "one a GPU (srun --ntasks-per-node)"
        )
    return each


def _expect_srun(environ: Mapping[str, str]) -> None:
    """Raises `InputError` in a job of several nodes, outside any of its steps: all nodes but this would be idle."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes.isdecimal() and len(nodes) < 9 and int(nodes) > 1 and "SLURM_STEP_NUM_NODES" not in environ:
        raise InputError(
            f"this job has {nodes} nodes, and this command runs on one of them: start it with srun "
            "--ntasks-per-node=1, or give --nnodes 1 to leave the others idle"
        )


def _required_variable(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise InputError(f"{name} is not set, while others of its scheduler's variables are: give --nnodes and --rdzv")
    return environ[name]


def _whole(environ: Mapping[str, str], name: str, least: int) -> int:
    text = _required_variable(environ, name)
    if not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise InputError(
            f"{name}={text[:40]!r} in the environment: expected a whole number of at least {least}; unset what "
            "torchrun or SLURM left, or give --nnodes"
        )
    return int(text)


def _first_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed list, as scontrol expands it.

    The result is its name or, if that does not resolve, the address by which SLURM itself reaches it.
    """
    try:
        host = _scontrol("hostnames", nodelist).split()[0]
        if _resolves(host):
            return host
        address = re.search(r"\bNodeAddr=(\S+)", _scontrol("node", host))
    except (OSError, ValueError, subprocess.CalledProcessError, IndexError) as error:
        raise InputError(f"SLURM's node list {nodelist!r} is not known to scontrol ({error}): give --rdzv") from error
    if address and _resolves(address[1]):
        return address[1]
    raise InputError(
        f"the first node of {nodelist!r} is {host}, at {address[1] if address else 'no address'}, which this machine "
        "cannot resolve: give --rdzv HOST:PORT, an IP address of that node and a free port there"
    )


def _scontrol(*what: str) -> str:
    return subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, check=True).stdout


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
