"""torchrun's elastic agents on two nodes: a rank is killed, the agents start all ranks again, which go on from the last
checkpoint. What comes of it is what comes of training that lost nobody, bit for bit."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos.nodes import HOSTS, LINKS
from benchmarks.cluster.nodes import Nodes
from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import Slurm
from benchmarks.cluster.trial import BEGIN_SECONDS
from meshmark.adapter.registry import builtin_adapters
from meshmark.conformance.scenario import RESUMED_STEPS
from meshmark.passes.resume import halfway
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

_LAYOUTS = {"ddp": Layout(dp=2), "fsdp2": Layout(dp=2, zero_stage=3)}
_TORCHRUN = ("torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--max-restarts=1")


def elastic(folder: Path, networks: Sequence[int]) -> dict[str, Callable[[], Row]]:
    """By name."""
    return {f"elastic_{name}": functools.partial(_elastic, folder, networks, name) for name in _LAYOUTS}


def request_of(task: Task, adapter: str, checkpoint: Path) -> Request:
    case = Case(adapter=adapter, workload=workload("gpt-mini"), layout=_LAYOUTS[adapter])
    return Request(
        case=case,
        adapter=builtin_adapters()[adapter],
        task=task,
        device="cpu",
        backend="gloo",
        steps=RESUMED_STEPS,
        checkpoint=str(checkpoint),
        time_limit_seconds=BEGIN_SECONDS,
    )


def _elastic(folder: Path, networks: Sequence[int], adapter: str) -> Row:
    with Nodes(folder, networks, f"elastic-{adapter}") as nodes:
        whole, _, wrong = run(nodes, request_of(Task.SAVE, adapter, nodes.trial.folder / "whole"))
        request = request_of(Task.LOSE, adapter, nodes.trial.folder / "lost")
        resumed, seconds, more = run(nodes, request, ends_as=Task.RESUME)
    wrong += more
    if not wrong and whole.digests[halfway(request) :] != resumed.digests:
        wrong.append(f"digests {resumed.digests}, without the loss {whole.digests[halfway(request) :]}")
    if not wrong and resumed.losses != whole.losses[halfway(request) :]:
        wrong.append(f"losses {resumed.losses}, without the loss {whole.losses}")
    return Row(
        engine="torchrun, elastic",
        shape="2 x 1 x 1, networks",
        fault=f"a rank killed, {adapter}",
        seconds=seconds,
        told="all restarted from the checkpoint: the same bits",
        lost="" if wrong else "nothing",
        wrong=wrong,
    )


def run(nodes: Nodes, request: Request, ends_as: Task | None = None) -> tuple[RankReport, float, list[str]]:
    """Return rank 0's last report, the seconds that the run took, and the complaints."""
    ends_as = ends_as or request.task
    reports, checkpoint = nodes.trial.folder / f"reports-{request.task}", Path(request.checkpoint)
    for made in (reports, checkpoint):
        made.mkdir()
    (reports / "request.json").write_text(json.dumps(encode(request)))
    began = time.monotonic()
    running = []
    for node in (0, 1):
        host = (f"--local-addr={HOSTS[node]}", f"--rdzv-conf=is_host={'false' if node else 'true'}")
        meeting = ("--rdzv-id=elastic", f"--rdzv-endpoint={HOSTS[0]}:29600")
        command = [*_TORCHRUN, *host, *meeting, "-m", "benchmarks.cluster.elastic_rank"]
        output = reports / f"output-{node}"
        told = [*command, str(reports / "request.json"), str(reports)]
        running.append(nodes.start(node, output, told, GLOO_SOCKET_IFNAME=LINKS[node]))
    Slurm.wait(lambda: all(process.poll() is not None for process in running), BEGIN_SECONDS)
    seconds, codes = time.monotonic() - began, [process.poll() for process in running]
    file = reports / f"{ends_as}-0"
    if codes != [0, 0] or not file.is_file():
        tails = [(reports / f"output-{node}").read_text(errors="replace")[-600:] for node in (0, 1)]
        empty = RankReport(rank=0, build_seconds=0.0, run_seconds=0.0)
        return empty, seconds, [f"{request.task} ended with {codes}: {tails}"]
    killed = any("exitcode: -9" in (reports / f"output-{node}").read_text(errors="replace") for node in (0, 1))
    wrong = [] if killed == (request.task is Task.LOSE) else ["a rank was killed" if killed else "no rank was killed"]
    found: RankReport = decode(RankReport, json.loads(file.read_text()))
    return found, seconds, wrong
