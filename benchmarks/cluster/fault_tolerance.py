"""torchft on two nodes, a replica on each: they are killed, one after the other, started again by their agents, and
take from the other what they had lost. What comes of it is what comes of training that lost nobody, under torchft as
under PyTorch's own data parallelism, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.chaos.nodes import HOSTS, LINKS
from benchmarks.cluster.elastic import request_of, run
from benchmarks.cluster.nodes import SHAPE, Nodes
from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import Slurm
from benchmarks.cluster.trial import BEGIN_SECONDS
from meshmark.records.request import Request, Task
from meshmark.serial import encode

_PORT = 29700
_NAMED = ("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"')
"""Command that sets the host's name, from which torchft's peers fetch a state: it must be the node's address."""
_LIGHTHOUSE = ("torchft_lighthouse", "--min_replicas=2", f"--bind=0.0.0.0:{_PORT}")
BACKWARD, UPDATE = "backward", "update"


class Reducer(StrEnum):
    """Part of torchft that reduces gradients."""

    MANAGER = "Manager.allreduce"
    MODULE = "its own DDP"


DEATHS: dict[Reducer, dict[int, tuple[int, str]]] = {
    Reducer.MANAGER: {1: (1, BACKWARD), 0: (2, UPDATE)},
    Reducer.MODULE: {1: (1, BACKWARD)},
}
"""By replica, the step in which it is killed, and before what: its peer then loses the step, or commits it alone."""
GAP = "assert fut._fut"
"""Where torchft 0.2.0's wrapper fails on the survivor too: its hook takes the future of an all-reduce that has failed,
which `_ManagedWork.wait` has never set (torchft/ddp.py, torchft/manager.py)."""
Notes = list[dict[str, Any]]


def by_torchft(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name."""
    return {
        f"torchft_{reducer.name.lower()}": functools.partial(_by_torchft, folder, networks, reducer)
        for reducer in Reducer
    }


def _by_torchft(folder: Path, networks: Sequence[int], reducer: Reducer) -> Row:
    with Nodes(folder, networks, f"torchft-{reducer.name.lower()}") as nodes:
        plain = request_of(Task.SAVE, "ddp", nodes.trial.folder / "saved")
        ddp, _, wrong = run(nodes, plain)
        whole, _, _, more = _run(nodes, dataclasses.replace(plain, task=Task.OBSERVE), reducer)
        lost, seconds, fallen, most = _run(nodes, dataclasses.replace(plain, task=Task.LOSE), reducer)
    wrong += [*more, *most]
    gap = reducer is Reducer.MODULE
    if fallen != gap:
        wrong.append("the survivor failed too" if fallen else f"the known gap {GAP!r} is closed: judge it as the other")
    if not wrong:
        wrong = _differences(ddp.digests[1:], whole, lost, reducer)
    told = "known gap: the survivor fails too, all begin anew" if gap else "each healed from the other: DDP's bits"
    return Row(
        engine="torchft",
        shape=SHAPE,
        fault=f"{'a replica' if gap else 'each replica'} killed, {reducer}",
        seconds=seconds,
        told=told,
        lost="all" if gap else "nothing",
        wrong=wrong,
    )


def _differences(ddp: Sequence[str], whole: Sequence[Notes], lost: Sequence[Notes], reducer: Reducer) -> list[str]:
    """Between DDP's digests after each step, those under torchft without a loss, and with one on each replica."""
    wrong = []
    for replica, (undisturbed, struck) in enumerate(zip(whole, lost, strict=True)):
        if (found := [note["digest"] for note in undisturbed]) != [*ddp]:
            wrong.append(f"replica {replica} without a loss: {found}, under DDP {ddp}")
        known = {note["step"]: (note["digest"], note["loss"]) for note in undisturbed}
        wrong += [
            f"replica {replica}: {note}, without the loss {known[note['step']]}"
            for note in struck
            if (note["digest"], note["loss"]) != known[note["step"]]
        ]
        steps, death = [note["step"] for note in struck if note["life"]], DEATHS[reducer].get(replica, (0, ""))[0]
        first = 0 if reducer is Reducer.MODULE else death
        if len(ddp) - 1 not in steps or min(steps) < first:
            wrong.append(f"replica {replica} was killed in step {death}, and then committed {steps}")
    steps = {note["step"] for notes in lost for note in notes}
    return wrong + ([] if steps == {*range(len(ddp))} else [f"steps {steps} were committed, of {len(ddp)}"])


def _run(nodes: Nodes, request: Request, reducer: Reducer) -> tuple[list[Notes], float, bool, list[str]]:
    """Return each replica's notes, the seconds, whether one failed by the known gap, and the complaints."""
    folder = nodes.trial.folder / f"notes-{request.task}"
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(encode(request)))
    began = time.monotonic()
    lighthouse = nodes.start(0, folder / "lighthouse", [*_NAMED, HOSTS[0], *_LIGHTHOUSE])
    running = [_start(nodes, node, folder, reducer) for node in (0, 1)]
    Slurm.wait(lambda: all(process.poll() is not None for process in running), BEGIN_SECONDS)
    seconds, codes = time.monotonic() - began, [process.poll() for process in running]
    lighthouse.kill()
    lighthouse.wait()
    said = [(folder / f"output-{node}").read_text(errors="replace") for node in (0, 1)]
    fallen = any(GAP in text for text in said)
    if codes != [0, 0]:
        return [], seconds, fallen, [f"{request.task} under torchft ended with {codes}: {[t[-900:] for t in said]}"]
    killed = {node for node, text in enumerate(said) if "exitcode: -9" in text}
    meant = {*DEATHS[reducer]} if request.task is Task.LOSE else set[int]()
    wrong = [] if killed == meant else [f"replicas {killed} were killed, expected {meant}"]
    files = [folder / f"replica{node}" for node in (0, 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files], seconds, fallen, wrong


def _start(nodes: Nodes, node: int, folder: Path, reducer: Reducer) -> subprocess.Popen[bytes]:
    agent = ["torchrun", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=1", f"--local-addr={HOSTS[node]}"]
    meeting = [f"--master-addr={HOSTS[node]}", "--master-port=29600"]
    rank = ["-m", "benchmarks.cluster.torchft_rank", str(folder / "request.json"), str(folder), reducer]
    return nodes.start(
        node,
        folder / f"output-{node}",
        [*_NAMED, HOSTS[node], *agent, *meeting, *rank],
        GLOO_SOCKET_IFNAME=LINKS[node],
        TORCHFT_LIGHTHOUSE=f"http://{HOSTS[0]}:{_PORT}",
        REPLICA_GROUP_ID=str(node),
    )
