"""Two nodes on one machine: the same command on each, one rendezvous a case, the same record on both."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import time as real
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cluster.adapters import GATE
from meshmark.adapter.registry import builtin_adapters
from meshmark.errors import ClusterError, InputError, NodeLostError, NodesDisagreeError, NoSpaceError
from meshmark.judge.deviation import Assess
from meshmark.launch import cluster, store
from meshmark.launch.cluster import Cluster, ClusterSpec, NodeLoss, node_loss
from meshmark.launch.launch import LaunchResult, launch_with
from meshmark.launch.rank import RankInfo
from meshmark.launch.watchdog import Watchdog
from meshmark.records.rank_report import RankFailure, RankReport
from meshmark.records.record import Status
from meshmark.records.record_file import read_records
from meshmark.records.request import Request, Task
from meshmark.reference import data
from meshmark.run.assemble import outcome_of_error, outcome_of_launch
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import encode
from meshmark.spec.layout import Layout
from tests.factories import make_case, make_workload

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_an_address_of_ipv6_may_stand_in_brackets() -> None:
    spec = ClusterSpec(nnodes=2, rdzv="[::1]:29511")
    assert (spec.host, spec.port) == ("::1", 29511)


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
                "--timing-budget=0",
                "--steps=3",
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


@pytest.mark.slow
def test_both_nodes_pass_and_node_0_writes(tmp_path: Path) -> None:
    for code, output in two_nodes(tmp_path, "--adapters", "ddp", "--workload", "gpt-mini"):
        assert code == 0, output
    observed, timed = read_records(tmp_path / "0").records
    assert observed.environment.nnodes == 2
    assert len(observed.memory.readings) == 2 and len(timed.timing.rank_step_seconds) == 2
    assert [place.node for place in observed.traffic.places] == [0, 1]
    reach = observed.traffic.reach
    assert reach and reach == observed.traffic.planned_reach and reach.between_nodes > reach.within_nodes == 0
    assert not (tmp_path / "1" / "records.jsonl").exists()


@pytest.mark.slow
def test_a_failure_on_one_node_is_the_same_outcome_on_both(tmp_path: Path) -> None:
    target = ROOT / "tests" / "broken" / "outcomes.py"
    raising = ("--adapter", f"{target}:Raises", "--workload", "gpt-mini", "-k", "throughput")
    for code, output in two_nodes(tmp_path, *raising):
        assert code == 1
        assert "raised on rank 1: ArithmeticError: planted in step 3" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost, happens, told",
    [
        (1, signal.SIGSTOP, r"node 1 of 2 has given no sign of life for 6 s"),
        (0, signal.SIGKILL, r"node 0's store at 127.0.0.1:\d+ (has closed|does not answer)"),
        (0, signal.SIGSTOP, r"node 0's store at 127.0.0.1:\d+ does not answer"),
    ],
)
def test_a_node_that_is_lost_ends_the_other(tmp_path: Path, lost: int, happens: signal.Signals, told: str) -> None:
    """Sooner than users' nodes, which wait for 15 s."""
    assert store.SILENT_SECONDS == store._CALL_SECONDS == 15.0
    target = ROOT / "tests" / "broken" / "outcomes.py"
    environment = {**os.environ, "MESHMARK_TEST_HANGS": str(tmp_path / "hangs")}
    hanging = ("--adapter", f"{target}:Hangs", "-k", "throughput", "--workload", "gpt-mini")
    nodes = start_nodes(tmp_path, *hanging, "-p", "tests.broken.impatient", environment=environment)
    try:
        deadline = time.monotonic() + 300
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
    if lost:  # node 0 writes
        (record,) = read_records(tmp_path / "0").records
        assert record.outcome.status is Status.NODE_LOST, record.outcome


@pytest.mark.slow
def test_a_run_goes_on_without_a_node_that_is_lost(tmp_path: Path) -> None:
    """With the cases that fit: the one that was under way runs again, a larger one is skipped with its reason."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("two ranks fit no node of one core")
    gate = tmp_path / "gate"
    gate.touch()
    waits = ["--adapter", "benchmarks.cluster.adapters:Waits", "--workload", "gpt-mini", "-k", "throughput", "-rs"]
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        nodes = start_nodes(
            tmp_path,
            *[*waits, "--world", "2,4", "--on-node-loss", "continue", "-p", "tests.broken.impatient"],
            environment={**os.environ, GATE: str(gate)},
        )
    finally:
        os.sched_setaffinity(0, cores)
    try:
        deadline = time.monotonic() + 300
        while not all((tmp_path / f"waits-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and nodes[0].poll() is None
            time.sleep(0.1)
        nodes[1].kill()
        gate.unlink()
        output, _ = nodes[0].communicate(timeout=240)
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert nodes[0].returncode == 0, output
    assert "node 1 of 2 has given no sign of life for 6 s: going on with node 0" in output
    lost, again, larger = read_records(tmp_path / "0").records
    assert (lost.outcome.status, lost.environment.nnodes) == (Status.NODE_LOST, 2)
    assert (again.outcome.status, again.environment.nnodes) == (Status.OK, 1) and again.case == lost.case
    assert larger.outcome.status is Status.SKIPPED and larger.case.world_size == 4
    assert larger.outcome.message == "4 ranks are more than 1 node can hold, 2 each; node 1 of 2 is lost"


def test_nodes_that_are_left_go_on_where_they_stand_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of five nodes is lost, and the fourth had come further than node 0. Three go on, under new ranks."""
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "a secret of this test")
    monkeypatch.setattr(store, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(cluster, "_BEAT_SECONDS", 0.2)
    ended: dict[int, object] = {}
    rdzv = f"127.0.0.1:{free_port()}"

    def run(rank: int) -> None:
        with Cluster(ClusterSpec(nnodes=5, node_rank=rank, rdzv=rdzv)) as node:
            if rank == 1:
                node._close()
                node._store = None
                return
            try:
                with pytest.raises(NodeLostError, match="node 1 of 5"):
                    node.exchange("result", "", seconds=60)
                node.regroup("another case" if rank == 3 else "case 7", room=rank + 2, seconds=30)
                met = node.exchange("launch", f"of {rank}", seconds=30)
                with pytest.raises(NoSpaceError, match="full" if rank == 4 else "node 4: full"):
                    cluster.meet(node, asked(), NoSpaceError("full") if rank == 4 else None)
                ended[rank] = (
                    node.numbers,
                    node.spec.node_rank,
                    node.spec.nnodes,
                    met,
                    node.room,
                    node.lost_nodes_note,
                )
            except ClusterError as error:
                ended[rank] = str(error)

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(5)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=60)
    told = ["of 0", "of 2", "of 4"]
    for place, rank in enumerate((0, 2, 4)):
        assert ended[rank] == ([0, 2, 4], place, 3, told, 2, "; node 1, 3 of 5 is lost")
    assert str(ended[3]).endswith(". Nodes that continue without node 3: [0, 2, 4]")


def test_a_node_that_comes_back_when_the_others_have_gone_on_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, wherever it waits; and one of those that went on may be lost as well, in the end too."""
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "a secret of this test")
    monkeypatch.setattr(store, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(cluster, "_BEAT_SECONDS", 0.2)
    rdzv, gone_on, ended, said = f"127.0.0.1:{free_port()}", threading.Event(), dict[int, object](), list[str]()

    def lives(node: Cluster, lost: int, left: list[int]) -> None:
        with pytest.raises(NodeLostError, match=f"node {lost} of 4 has given no sign"):
            node.exchange("result", "", seconds=60)
        node.regroup("case 7", room=2, seconds=30)
        assert node.numbers == left

    def run(rank: int) -> None:
        with Cluster(ClusterSpec(nnodes=4, node_rank=rank, rdzv=rdzv), said.append) as node:
            if rank == 3:
                node._ended.set()  # frozen
                assert gone_on.wait(30)
                node._ended.clear()
                threading.Thread(target=node._beat, daemon=True).start()
                began = time.monotonic()
                with pytest.raises(NodeLostError, match="node 3 of 4 has given no sign of life"):
                    for what in ("result", "launch"):  # to the first the others had come before they missed it
                        node.exchange(what, "", seconds=60)
                with pytest.raises(ClusterError, match=r"Nodes that continue without node 3: \[0, 1, 2\]"):
                    node.regroup("case 7", room=2, seconds=30)
                ended[rank] = time.monotonic() - began
                return
            lives(node, 3, [0, 1, 2])
            gone_on.set()
            if rank == 0:
                lives(node, 2, [0, 1])
                ended[rank] = node.spec.nnodes
            elif rank == 1:
                lives(node, 2, [0, 1])
                threads_end(node)
            else:
                threads_end(node)

    def threads_end(node: Cluster) -> None:
        """As a process does that is killed."""
        node._close()
        node._store = None

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert ended.pop(0) == 2 and float(str(ended.pop(3))) < 5.0 and not ended
    assert "node 1 of 4 has given no sign of life for 15 s: when all was done" in said


def test_a_node_lost_where_a_folder_is_agreed_on_is_gone_on_without(tmp_path: Path) -> None:
    """Before any case needs the others; by default the run ends. What was made for all is not left behind."""

    def lose(*_: object, **__: object) -> None:
        raise NodeLostError("node 1 of 2 is gone")

    def regroup(*_: object, **__: object) -> None:
        nodes.spec = ClusterSpec()

    nodes = SimpleNamespace(spec=ClusterSpec(nnodes=2, rdzv="a:1"), numbers=[0], regroup=regroup, exchange=lose)
    launcher = SimpleNamespace(cluster=nodes, close=lambda: None)
    for what in NodeLoss:
        runner = Runner(launcher, builtin_adapters(), RunOptions(on_node_loss=what), tmp_path / what)  # type: ignore[arg-type]
        with pytest.raises(NodeLostError) if what is NodeLoss.END else contextlib.nullcontext():
            assert runner.scratch.folder.is_dir() and runner.scratch.missing == []
        assert len([*(tmp_path / what).glob("scratch-*")]) == (what is NodeLoss.CONTINUE)
        runner.close()


def test_what_to_do_without_a_node_is_one_of_two() -> None:
    assert [node_loss(text) for text in ("end", "continue")] == [*NodeLoss]
    with pytest.raises(InputError, match="unknown --on-node-loss 'contineu': did you mean 'continue'"):
        node_loss("contineu")


def test_a_case_that_no_longer_fits_stays_lost_and_the_run_goes_on(tmp_path: Path) -> None:
    """Or the run ends, by default; and where node 0 is gone, whatever was asked for."""

    def lose(*_: object, **__: object) -> None:
        raise NodeLostError("node 1 of 2 is gone")

    def regroup(*_: object, **__: object) -> None:
        nodes.spec, nodes.room = ClusterSpec(), 2

    spec = ClusterSpec(nnodes=2, rdzv="a:1")
    nodes = SimpleNamespace(spec=spec, room=None, lost_nodes_note="", regroup=regroup)
    launcher = SimpleNamespace(cluster=nodes, launch=lose, close=lambda: None)
    four = make_case("ddp", layout=Layout(dp=4))
    for what in NodeLoss:
        nodes.spec = spec
        options = RunOptions(on_node_loss=what, assess=Assess.OFF)
        runner = Runner(launcher, builtin_adapters(), options, tmp_path / what)  # type: ignore[arg-type]
        with pytest.raises(NodeLostError) if what is NodeLoss.END else contextlib.nullcontext():
            assert runner.time(four).outcome.status is Status.NODE_LOST
            assert runner.time(four).outcome.message == "node 1 of 2 is gone", "and is not tried again"
        runner.close()
        assert len(read_records(tmp_path / what).records) == 1
    nodes.spec, nodes.regroup = spec, lose
    runner = Runner(launcher, builtin_adapters(), options, tmp_path / "none")  # type: ignore[arg-type]
    with pytest.raises(NodeLostError):
        runner.time(four)
    runner.close()


def test_a_node_that_is_started_twice_is_refused_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "a secret of this test")
    rdzv, second, met = f"127.0.0.1:{free_port()}", threading.Event(), dict[int, list[str]]()

    def run(rank: int) -> None:
        with Cluster(ClusterSpec(nnodes=2, node_rank=rank, rdzv=rdzv)) as node:
            assert second.wait(30)
            met[rank] = node.exchange("result", f"of {rank}", seconds=30)

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    running[0].start()
    early = Cluster(ClusterSpec(nnodes=2, node_rank=0, rdzv=rdzv))
    early._store = early._connect(b"a secret of this test")
    running[1].start()
    while not early._store.check(["claimed/1"]):
        time.sleep(0.01)
    with pytest.raises(ClusterError, match="node 1 of 2 has joined the run at .* before: is its command running twice"):
        Cluster(ClusterSpec(nnodes=2, node_rank=1, rdzv=rdzv)).__enter__()
    early._close()
    second.set()
    for thread in running:
        thread.join(timeout=60)
    assert met == {0: ["of 0", "of 1"], 1: ["of 0", "of 1"]}


def test_a_wait_for_nodes_is_told_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody there, somebody else there, and only node 0 there."""
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "a secret of this test")
    monkeypatch.setattr(cluster, "_JOIN_SECONDS", 3)
    monkeypatch.setattr(cluster, "_SAY_SECONDS", 1.0)
    monkeypatch.setattr("meshmark.launch.store._PROVE_SECONDS", 2.0)
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
        with pytest.raises(ClusterError, match="the program at .* is not this run's store"):
            Cluster(spec).__enter__()
        assert 2 <= time.monotonic() - started < 12


class Ranks:
    """Ranks of one node that are no processes: each leaves a report at once and ends, or never ends."""

    grace_seconds = 0.0
    is_gone = False

    def __init__(self, ranks: Sequence[RankInfo], hang: bool) -> None:
        self.ranks, self.hang = ranks, hang

    def start(self) -> None:
        self.began = time.monotonic()
        for info in self.ranks[: 1 if self.hang else None]:
            report = RankReport(rank=info.rank, build_seconds=0.0, run_seconds=0.0)
            info.file("report").write_text(json.dumps(encode(report)))

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def pid(self, info: RankInfo) -> int | None:
        return None

    def exit_code(self, info: RankInfo) -> int | None:
        return 0 if info.file("report").is_file() else None

    def spared(self, info: RankInfo) -> bool:
        return False

    def end(self) -> list[int]:
        return []


@dataclass
class Node:
    """One of two nodes, in a thread of this process: what it asks for, and what becomes of it."""

    request: Request
    late: float = 0.0
    fails: Exception | None = None
    hangs: bool = False
    dies: bool = False
    ended: LaunchResult | Exception | None = None
    ranks: Ranks | None = None

    def run(self, spec: ClusterSpec) -> None:
        def start(request: Request, ranks: Sequence[RankInfo]) -> Ranks:
            time.sleep(self.late)
            if self.fails:
                raise self.fails
            if self.dies:
                threading.Timer(0.5, node._close).start()
            self.ranks = Ranks(ranks, self.hangs)
            return self.ranks

        try:
            with Cluster(spec) as node:
                self.ended = launch_with(start, node, self.request, 4)
        except Exception as error:
            self.ended = error


def asked(**changes: Any) -> Request:  # noqa: ANN401
    known: dict[str, Any] = {"task": Task.TIME, "device": "cpu", "backend": "gloo", "steps": 2, "time_limit_seconds": 1}
    known |= {"case": make_case(layout=Layout(dp=4)), "adapter": "meshmark.adapters.ddp:DDP"}
    return Request(**{**known, **changes})


def meet(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> list[LaunchResult | Exception | None]:
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "a secret of this test")
    rdzv = f"127.0.0.1:{free_port()}"
    specs = [ClusterSpec(nnodes=2, node_rank=rank, rdzv=rdzv) for rank in range(2)]
    running = [threading.Thread(target=node.run, args=(spec,)) for node, spec in zip(nodes, specs, strict=True)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=60)
    return [node.ended for node in nodes]


def test_a_node_that_is_late_is_waited_for_and_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """By twice the time limit, which is for ranks: they start when all nodes are there."""
    nodes = Node(asked()), Node(asked(), late=2.0)
    lasted = set()
    for ended in meet(monkeypatch, *nodes):
        assert isinstance(ended, LaunchResult) and not ended.failures and not ended.lost, ended
        assert [report.rank for report in ended.reports] == [0, 1, 2, 3]
        lasted.add(ended.seconds)
    assert len(lasted) == 1, "what the next launch is asked may follow from it, and must be the same on all nodes"
    first, second = (node.ranks.began for node in nodes if node.ranks)
    assert abs(first - second) < 1.0


def test_nodes_that_were_asked_for_different_things_start_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each difference is named; a corpus may lie at another path, but not be another text."""
    texts = [tmp_path / name / "corpus.txt" for name in "ab"]
    for text, content in zip(texts, ("to be ", "not to be "), strict=True):
        text.parent.mkdir()
        text.write_text(content * 1000)
    workloads = [dataclasses.replace(make_workload(), corpus=str(text)) for text in texts]
    requests = [asked(case=make_case(workload=w), steps=n) for w, n in zip(workloads, (2, 3), strict=True)]
    for ended in meet(monkeypatch, *map(Node, requests)):
        assert isinstance(ended, NodesDisagreeError)
        differs = re.findall(r"(?:about|;) ([^(]*) \(", str(ended))
        assert differs == ["data", "request's steps"], ended
        assert "request's steps (2 on node 0, 3 on node 1)" in str(ended)
        assert outcome_of_error(ended).status is Status.NODES_DISAGREE
    texts[1].write_text(texts[0].read_text())
    data.load_corpus.cache_clear()
    for ended in meet(monkeypatch, *(Node(dataclasses.replace(request, steps=2)) for request in requests)):
        assert isinstance(ended, LaunchResult), ended


def test_nodes_with_unlike_numbers_of_gpus_start_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks would share the fewer ones; not where all have enough."""
    here = threading.local()
    monkeypatch.setattr(cluster, "num_gpus", lambda: here.__dict__.get("gpus", 8))

    class Small(Node):
        def run(self, spec: ClusterSpec) -> None:
            here.gpus = 2
            super().run(spec)

    on_gpus = asked(
        device="cuda", backend="nccl", case=make_case(layout=Layout(dp=8), workload=make_workload(global_batch=8))
    )
    for ended in meet(monkeypatch, Node(on_gpus), Small(on_gpus)):
        assert isinstance(ended, NodesDisagreeError)
        assert "about GPUs that 4 ranks can use (4 on node 0, 2 on node 1): " in str(ended)
    enough = dataclasses.replace(on_gpus, case=make_case(layout=Layout(dp=4)))
    assert all(isinstance(ended, LaunchResult) for ended in meet(monkeypatch, Node(enough), Small(enough)))


def test_what_keeps_one_node_from_starting_is_the_same_outcome_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    full = NoSpaceError("'/tmp' has room for 0 bytes")
    first, second = meet(monkeypatch, Node(asked()), Node(asked(), fails=full))
    assert second is full
    assert isinstance(first, NoSpaceError) and str(first) == "node 1: '/tmp' has room for 0 bytes"
    assert outcome_of_error(first).status is Status.NO_SPACE


def test_what_landed_is_kept_when_a_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(cluster, "_BEAT_SECONDS", 0.2)
    survivor = Node(asked(time_limit_seconds=60), hangs=True)
    started = time.monotonic()
    ended, _ = meet(monkeypatch, survivor, Node(asked(time_limit_seconds=60), dies=True))
    assert time.monotonic() - started < 15
    assert isinstance(ended, LaunchResult), ended
    assert [report.rank for report in ended.reports] == [0]
    assert re.match("node 1 of 2 (has given no sign of life|has ended)", ended.lost)
    assert outcome_of_launch(ended, 4).status is Status.NODE_LOST


def test_clocks_apart_do_not_change_whose_failure_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1's clock is an hour behind; its ranks failed after node 0's."""
    here = threading.local()
    monkeypatch.setattr(store, "time", SimpleNamespace(time=lambda: real.time() - here.__dict__.get("behind", 0.0)))
    for name in ("monotonic", "sleep"):
        setattr(store.time, name, getattr(real, name))

    def run(watchdog: Watchdog) -> list[RankFailure]:
        first = min(info.rank for info in watchdog.ranks)
        told = real.time() - here.__dict__.get("behind", 0.0) + 0.5 * bool(first)
        return [RankFailure(rank=first, kind=Status.RAISED, message="", time=told)]

    monkeypatch.setattr(Watchdog, "run", run)

    class Behind(Node):
        def run(self, spec: ClusterSpec) -> None:
            here.behind = 3600.0
            super().run(spec)

    for ended in meet(monkeypatch, Node(asked()), Behind(asked())):
        assert isinstance(ended, LaunchResult), ended
        assert [failure.rank for failure in ended.failures] == [0, 2]
        assert ended.failures[1].time - ended.failures[0].time < 5


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
