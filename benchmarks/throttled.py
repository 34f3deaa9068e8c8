"""Steps of algorithms on throttled links: four ranks, each in a network of its own, joined by a switch, every link
letting through so many Mbit/s each way (tc's tbf). For root.

Leaves baselines/throttled.csv, which `make convergence` holds its computed map against: `make throttled`.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cluster.switch import HOSTS, say, switched
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.environment import describe
from meshmark.reference.data import make_batch
from meshmark.spec.algorithm import algorithm_named
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

TABLE = Path(__file__).parent.parent / "baselines" / "throttled.csv"
MODEL, WORKERS = "gpt-mini-sgd", len(HOSTS)
MEGABITS = (0, 80, 20, 5)
"""Bandwidth of every link in each direction, in Mbit/s; 0 for no limit."""
ADAPTERS = {
    "synchronous": "ddp",
    "local-sgd2": "post-local-sgd",
    "dsgd-ring": "decentralised",
    "dsgd-one-peer": "decentralised",
    "error-feedback-top-k10": "compressed",
    "error-feedback-sign": "compressed",
    "double-squeeze-sign": "compressed",
}
"""By algorithm."""
STEPS, ROUNDS = 4, 5
"""Timed together, as many as every algorithm's period divides; and how often, in turn with the other algorithms."""
_SHAPE = "tc qdisc replace dev {} root tbf rate {}mbit burst 4kb latency 20000ms"
"""A burst is sent at once, however slow the link: it is little beside the smallest message. Nothing is dropped, for TCP
would wait a fifth of a second each time."""
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Rank:
    process: multiprocessing.context.ForkProcess
    connection: Connection

    def hear(self) -> float:
        if not self.connection.poll(_PATIENCE_SECONDS):
            raise TimeoutError(f"a rank has said nothing for {_PATIENCE_SECONDS:.0f} s")
        seconds: float = self.connection.recv()
        return seconds


def case_of(name: str) -> Case:
    plain = MODEL if name == "synchronous" else f"{MODEL}-{name}"
    return Case(adapter=ADAPTERS[name], workload=workload(plain), layout=Layout(dp=WORKERS))


def main() -> int:
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        print("throttled: needs root, and iproute2 and util-linux (ip, tc, unshare, nsenter)", file=sys.stderr)
        return 2
    here = describe("cpu", "gloo", 1, ["make", "throttled"])
    rows: list[dict[str, object]] = []
    with switched(WORKERS) as [*nodes, switch], ranks_in(nodes) as ranks:
        for megabits in MEGABITS:
            if megabits:
                throttle(nodes, switch, megabits)
            seconds: dict[str, list[float]] = {name: [] for name in ADAPTERS}
            for _ in range(ROUNDS):
                for name, found in seconds.items():
                    found.append(step_seconds(ranks, name))
            for name, found in seconds.items():
                row = dict(zip(("fastest", "median", "slowest"), _three(found), strict=True))
                rows.append({"algorithm": name, "workers": WORKERS, "megabits": megabits, **row})
                print(*rows[-1].values(), flush=True)
    told = {"model": MODEL, "machine": here.machine, "commit": here.commit, "date": here.date}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *told], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **told} for row in rows)
    return 0


def _three(found: Sequence[float]) -> list[str]:
    return [f"{seconds:.5f}" for seconds in (min(found), statistics.median(found), max(found))]


def throttle(nodes: Sequence[int], switch: int, megabits: int) -> None:
    for number, node in enumerate(nodes):
        say(node, _SHAPE.format(f"link{number}", megabits))
        say(switch, _SHAPE.format(f"port{number}", megabits))


def step_seconds(ranks: Sequence[Rank], name: str) -> float:
    """Return the seconds of the slowest rank's step."""
    for rank in ranks:
        rank.connection.send(name)
    return max([rank.hear() for rank in ranks])


@contextlib.contextmanager
def ranks_in(networks: Sequence[int]) -> Iterator[list[Rank]]:
    """One in each network, all engines built."""
    fork, found = multiprocessing.get_context("fork"), list[Rank]()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for number, network in enumerate(networks):
                ours, theirs = fork.Pipe()
                process = fork.Process(target=_serve, args=(number, network, theirs, Path(scratch)), daemon=True)
                process.start()
                theirs.close()
                found.append(Rank(process=process, connection=ours))
            for rank in found:
                rank.hear()
            yield found
        finally:
            for rank in found:
                rank.process.kill()
                rank.process.join()


def _serve(number: int, network: int, commands: Connection, scratch: Path) -> None:
    """Steps of whichever algorithm is asked for."""
    with Path(f"/proc/{network}/ns/net").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"network of process {network} cannot be entered")
    os.environ["GLOO_SOCKET_IFNAME"] = f"link{number}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{HOSTS[0]}:29500", rank=number, world_size=WORKERS)
    device = torch.device("cpu")
    context = RankContext(rank=number, world_size=WORKERS, device=device, backend="gloo", scratch=scratch)
    engines = {name: _built(name, context) for name in ADAPTERS}
    batches = [make_batch(workload(MODEL), step) for step in range(STEPS)]
    for engine in engines.values():
        for batch in batches:
            engine.step(batch)
    commands.send(0.0)
    while True:
        engine = engines[commands.recv()]
        dist.barrier()
        started = time.perf_counter()
        for batch in batches:
            engine.step(batch)
        commands.send((time.perf_counter() - started) / STEPS)


def _built(name: str, context: RankContext) -> Engine:
    case = case_of(name)
    assert STEPS % (1 if name == "synchronous" else algorithm_named(name).steps_per_meeting) == 0
    return load_adapter(builtin_adapters()[case.adapter])().build(case, context)


if __name__ == "__main__":
    sys.exit(main())
