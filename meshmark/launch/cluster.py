"""The nodes of one run: their identities, and how their launchers communicate.

Every node runs the same pytest command. Node 0's process serves one key-value store for the whole run. Each launch is a
rendezvous under a prefix of its own. Launchers exchange the results of their ranks, so that every node has all of them.
A single node needs no store: its launches meet in a file that only this user can open.

A scheduler says which of a run's launchers this process is, and where the first of them listens. A launcher is either
the only process on a node, or one of the tasks that `srun` or `torchrun` starts there. Both shapes run the same ranks.
In the second shape, each task has a share of them.

Nodes meet before they start ranks. If a node lacks something, or has another version of it, all nodes report that and
start no rank. The nodes share a private folder inside the run's results, which is removed with the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import glob
import hashlib
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import meshmark
from meshmark.adapter.registry import load_adapter
from meshmark.environment import installed, num_gpus, versions
from meshmark.errors import (
    ClusterError,
    InputError,
    MeshmarkError,
    NodeLostError,
    NodesDisagreeError,
    NoSpaceError,
    ResultsError,
    UnknownNameError,
)
from meshmark.launch.processes import process_state
from meshmark.launch.store import SILENT_SECONDS, RunStore, StoreServer, run_secret
from meshmark.records.record import code_digest_of
from meshmark.records.request import Request, Task
from meshmark.reference.data import data_digest
from meshmark.serial import encode
from meshmark.spec.case import Case
from meshmark.spec.own_model import OwnModelConfig
from meshmark.text import pluralize

# --- Lost nodes.


class NodeLoss(StrEnum):
    """Policy for a lost node."""

    END = "end"
    """End the run, in good order."""
    CONTINUE = "continue"
    """Continue with the remaining nodes, and the cases that fit them. Node 0 must remain: it has the records."""


def node_loss(text: str) -> NodeLoss:
    """Parse the value of `--on-node-loss`. Raises `UnknownNameError` for any other text."""
    if text not in [*NodeLoss]:
        raise UnknownNameError("--on-node-loss", text, list(NodeLoss))
    return NodeLoss(text)


def rank_room(device: str, num_gpus: int) -> int:
    """Return the number of ranks that this node can hold: one per GPU, or one per core."""
    return num_gpus if device == "cuda" else len(os.sched_getaffinity(0))


# --- Waiting for other nodes.

_POLL_SECONDS = 0.02
_SAY_SECONDS = 10.0


class Waiting:
    """A wait with a time limit, which reports itself from time to time."""

    def __init__(self, say: Callable[[str], None], seconds: float) -> None:
        self._say = say
        self._started = self._said = time.monotonic()
        self._seconds = seconds

    def over(self, text: str) -> bool:
        """Sleep briefly, and return whether the wait exceeds its limit. `text` says what is waited for."""
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - self._said > _SAY_SECONDS:
            self._said = now
            self._say(f"{text}, {now - self._started:.0f} s of {self._seconds:.0f}")
        return now - self._started > self._seconds


# --- Node 0's listening socket.

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address of `--rdzv` only.

    Raises `ClusterError` if it cannot be opened, or if no other node can reach the address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ClusterError(
            f"node 0 cannot listen at {host}:{port}: {error.strerror}; --rdzv takes an address of node 0 and "
            "a free port there"
        ) from error
    if host not in LOOPBACK and ipaddress.ip_address(address[0]).is_loopback:
        listener.close()
        raise ClusterError(
            f"{host} is {address[0]} on node 0 itself, which no other node reaches: give --rdzv an IP address"
        )
    return listener


# --- The cluster: nodes and their launchers.

_JOIN_SECONDS = 300
_BEAT_SECONDS = 2.0
_REGROUP_SECONDS = 60.0
"""Time in seconds for each remaining node to report its position after another node is lost."""
_END = "end"


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Identity of this launcher in a run. Raises `InputError` when the numbers contradict each other."""

    nnodes: int = 1
    """Number of launchers in the run: one per node, or one per task that a scheduler starts on a node."""
    node_rank: int = 0
    rdzv: str | None = None
    """HOST:PORT of node 0; needed for more than one node."""
    tasks_per_node: int = 1
    """Number of launchers on one host."""
    local_task: int = 0
    """Index of this launcher on its host."""
    gpus_by_task: bool = False
    """True if each task sees its own GPUs only."""
    host_number: int | None = None
    """Index of this host, if a scheduler reports it. Consecutive launchers need not be on one host."""
    switch: str = ""
    """Switch that its host is connected to, from the top of the network's tree, if a scheduler reports it."""

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise InputError(
                f"--node-rank {self.node_rank} with --nnodes {self.nnodes}: expected 0 to {self.nnodes - 1}"
            )
        if self.nnodes > 1 and self.rdzv is None:
            raise InputError(
                f"--nnodes {self.nnodes} needs --rdzv HOST:PORT, an address of node 0 and a free port there"
            )
        if self.rdzv is not None:
            host, _, port = self.rdzv.rpartition(":")
            if not (host and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16):
                raise InputError(f"--rdzv {self.rdzv!r}: expected HOST:PORT, with a port from 1 to 65535")

    @property
    def host(self) -> str:
        """The address of node 0. That of IPv6 may stand in brackets, as in a URL."""
        return self.rdzv.rpartition(":")[0].removeprefix("[").removesuffix("]") if self.rdzv else "127.0.0.1"

    @property
    def port(self) -> int:
        """0 when there is none."""
        return int(self.rdzv.rpartition(":")[2]) if self.rdzv else 0

    @property
    def num_hosts(self) -> int:
        return self.nnodes // self.tasks_per_node

    def among(self, node_rank: int, nnodes: int) -> ClusterSpec:
        """Return this specification with the `nnodes` launchers of whole nodes that are left, as number `node_rank`."""
        if nnodes == 1:  # it needs no address, and the way to the others may be gone
            return ClusterSpec(gpus_by_task=self.gpus_by_task, host_number=self.node, switch=self.switch)
        return dataclasses.replace(self, nnodes=nnodes, node_rank=node_rank, host_number=self.node)

    @property
    def node(self) -> int:
        """Which host this is."""
        return self.node_rank // self.tasks_per_node if self.host_number is None else self.host_number

    @property
    def text(self) -> str:
        """Numbers of tasks and nodes, in words."""
        nodes = pluralize(self.num_hosts, "node")
        return f"{self.nnodes} tasks on {nodes}" if self.tasks_per_node > 1 else nodes


class Cluster:
    """The running nodes. Use as a context manager."""

    def __init__(self, spec: ClusterSpec, say: Callable[[str], None] = lambda text: None) -> None:
        """`say` is called with a text about what is waited for."""
        self.spec, self._say = spec, say
        """Specification of the cluster of the nodes that are left."""
        self._id, self._all = spec.node_rank, list(range(spec.nnodes))
        self._members = self._all
        """Numbers of the remaining nodes. Nodes keep their first numbers in heartbeats, meetings and messages."""
        self._launches = self._meetings = self._regroups = 0
        self._server: StoreServer | None = None
        self._store: RunStore | None = None
        self._ended = threading.Event()
        self.clock_ahead = 0.0
        """Seconds by which node 0's clock is ahead of this node's."""
        self._lost = ""
        """Why the run cannot go on; empty as long as it can."""
        self._losing = threading.Lock()
        self.room: int | None = None
        """Number of ranks that each node can hold. None, and not checked, while no node is lost."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the nodes that are left. Nodes keep the numbers that they began with."""
        return list(self._members)

    @property
    def lost_nodes_note(self) -> str:
        """Suffix for reasons that are due to lost nodes; empty if no node is lost."""
        gone = [str(node) for node in self._all if node not in self._members]
        return f"; node {', '.join(gone)} of {len(self._all)} is lost" if gone else ""

    def __enter__(self) -> Cluster:
        spec = self.spec
        if spec.nnodes > 1:
            secret = run_secret()
            try:
                if spec.node_rank == 0:
                    self._server = StoreServer(listen(spec.host, spec.port), secret)
                self._store = self._connect(secret)
                if self._store.add(f"claimed/{self._id}", 1) > 1:
                    raise ClusterError(
                        f"node {self._id} of {spec.nnodes} has joined the run at {spec.host}:{spec.port} before: is "
                        "its command running twice, or do two nodes have the same --node-rank?"
                    )
                self._store.beat(self._id)  # otherwise a loss before the thread's first heartbeat goes unnoticed
                threading.Thread(target=self._beat, daemon=True, name="meshmark-heartbeat").start()
                self.exchange("join", "", seconds=_JOIN_SECONDS)
                self.clock_ahead = self._store.clock_ahead()
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._store and self._lost:
                self._meetings += 1
                with contextlib.suppress(ClusterError):  # so that the remaining nodes need not wait
                    self._store.set(self._seat(self._id), json.dumps([_END, ""]))
            elif self._store:
                self._leave(self._store)
        finally:
            self._close()

    def _leave(self, store: RunStore) -> None:
        """Leave the run. Node 0 leaves last, because it serves the store. Losing another node now loses no result."""
        try:
            self.exchange(_END, "", seconds=30)
        except NodeLostError as error:
            self._say(f"{error}: when all was done")
        store.set(f"left/{self._id}", "")
        if self._id == 0:
            silent = store.beat(0)
            here = [f"left/{node}" for node in self._members if node not in silent]
            store.wait(here, datetime.timedelta(seconds=30))

    def _close(self) -> None:
        self._ended.set()
        if self._store:
            self._store.close()
        if self._server:
            self._server.close()

    def _connect(self, secret: bytes) -> RunStore:
        """Connect to node 0's store as soon as it listens. Raises `ClusterError` if it does not in time."""
        spec = self.spec
        waiting = Waiting(self._say, _JOIN_SECONDS)
        while True:
            try:
                return RunStore(spec.host, spec.port, secret, datetime.timedelta(seconds=_JOIN_SECONDS))
            except NodeLostError as error:
                if waiting.over(f"waiting for node 0 of {spec.nnodes} at {spec.host}:{spec.port}"):
                    raise ClusterError(
                        f"node {spec.node_rank} of {spec.nnodes} found no store at {spec.host}:{spec.port} within "
                        f"{_JOIN_SECONDS} s: is node 0 running, and is the port open? ({error})"
                    ) from error

    def _beat(self) -> None:
        """Send heartbeats, and note the nodes whose heartbeats are missing."""
        assert self._store
        while not self._ended.wait(_BEAT_SECONDS):
            try:
                silent = [self._id] if self._is_left_behind(self._store) else self._store.beat(self._id)
            except ClusterError as error:
                self._lost = self._lost or str(error)
                return
            with self._losing:
                if nodes := ", ".join(str(node) for node in silent if node in self._members):
                    self._lost = (
                        f"node {nodes} of {len(self._all)} has given no sign of life for {SILENT_SECONDS:.0f} s"
                    )

    def _is_left_behind(self, store: RunStore) -> bool:
        """Return whether the others have continued without this node, because it was frozen or disconnected for a
        while.
        """
        chosen = f"regroup{self._regroups + 1}/chosen"
        return store.check([chosen]) and self._id not in json.loads(store.get(chosen))[0]

    def _check(self) -> RunStore:
        """Return the store. Raises `NodeLostError` when a node is lost."""
        assert self._store, "a single node shares nothing"
        if self._lost:
            raise NodeLostError(self._lost)
        return self._store

    def new_prefix(self) -> str:
        """Return a prefix for the keys of one launch. It is unique, and the same on every node."""
        self._launches += 1
        return f"launch{self._regroups}.{self._launches}"

    def announce(self, key: str) -> None:
        """Tell all nodes that `key` has happened."""
        self._check().set(key, "1")

    def happened(self, key: str) -> bool:
        """Return whether a node has announced `key`. Raises `NodeLostError` when a node is lost."""
        return self._check().check([key])

    def exchange(self, what: str, value: str, *, seconds: float) -> list[str]:
        """Return every node's `value`, by node rank. A collective call: all nodes make it in the same order.

        Raises `NodeLostError` when a node is lost or late, and `NodesDisagreeError` when a node is at another call
        (its `what` differs).
        """
        self._meetings += 1
        seats = {self._seat(node): f"node {node} of {len(self._all)}" for node in self._members}
        self._check().set(self._seat(self._id), json.dumps([what, value]))
        self._await(seats, what, seconds)
        told = self._check().get_all([*seats])  # one request; one per node would be quadratic over all nodes
        return [self._expect(name, what, json.loads(text)) for name, text in zip(seats.values(), told, strict=True)]

    def regroup(self, place: str, room: int, *, seconds: float) -> None:
        """Continue without the lost nodes.

        Node 0 chooses the nodes that continue, among those that report the same `place` in time. The other nodes wait
        `seconds` for its choice, in addition to the time in which nodes report. Raises `ClusterError` if node 0 is
        lost, or if this node is not chosen.
        """
        assert self._store, "a single node cannot lose another"
        self._regroups += 1
        self._store.set(f"regroup{self._regroups}/{self._id}", json.dumps([place, room, self.spec.node]))
        chosen = f"regroup{self._regroups}/chosen"
        if self._id == 0:
            self._store.set(chosen, json.dumps(self._choose(place)))
        self._store.wait([chosen], datetime.timedelta(seconds=seconds + _REGROUP_SECONDS))
        left, self.room = json.loads(self._store.get(chosen))
        if self._id not in left:
            raise ClusterError(f"{self._lost}. Nodes that continue without node {self._id}: {left or 'none'}")
        self._say(f"{self._lost}: going on with node {', '.join(map(str, left))}")
        with self._losing:
            self._members, self._lost = left, ""
        self._launches = self._meetings = 0
        self.spec = self.spec.among(left.index(self._id), len(left))

    def _choose(self, place: str) -> tuple[list[int], int]:
        """Return the launchers that continue, and the number of ranks that each can hold.

        They are those that report this one's place in time, if all launchers of their host do.
        """
        assert self._store
        waiting = Waiting(self._say, _REGROUP_SECONDS)
        while True:
            silent = self._store.beat(self._id)
            seats = {f"regroup{self._regroups}/{node}": node for node in self._members if node not in silent}
            away = self._store.missing([*seats])
            if not away or waiting.over(f"waiting for node {seats[away[0]]} to go on without those that are lost"):
                break
        told = {node: json.loads(self._store.get(seat)) for seat, node in seats.items() if seat not in away}
        hosts = Counter(host for theirs, _, host in told.values() if theirs == place)
        left = [node for node, (_, _, host) in told.items() if hosts[host] == self.spec.tasks_per_node]
        if 0 not in left:  # node 0 has the records and the store
            return [], 0
        return left, min(told[node][1] for node in left)

    def _seat(self, node: int) -> str:
        return f"meeting{self._regroups}.{self._meetings}/{node}"

    def _await(self, seats: Mapping[str, str], what: str, seconds: float) -> None:
        """Wait until every node has come to the meeting."""
        waiting = Waiting(self._say, seconds)
        while missing := self._check().missing([*seats]):
            first = seats[missing[0]]
            if waiting.over(f"waiting for {first} at {what!r}{self._refused}"):
                self._lost = (
                    f"{first} did not answer within {seconds:.0f} s at {what!r}: "
                    f"did its pytest command end, or was it given other options?{self._refused}"
                )

    @property
    def _refused(self) -> str:
        """Addresses of peers that node 0 did not let in. Each peer reports the refusal only to its own user."""
        if not (self._server and self._server.refused):
            return ""
        return f" (from {', '.join(sorted(self._server.refused))} somebody came who holds another secret)"

    def _expect(self, name: str, what: str, told: tuple[str, str]) -> str:
        """Return the value that a node brought to the meeting.

        Raises `NodesDisagreeError` if the node is at another meeting.
        """
        theirs, value = told
        if theirs != what and theirs == _END:
            self._lost = f"{name} has ended its run before {what!r}"
            self._check()
        if theirs != what:
            raise NodesDisagreeError(
                f"{name} is at {theirs!r}, this node at {what!r}: start all nodes with the same command"
            )
        return str(value)


# --- A private folder of one run inside its results.

_ANSWER_SECONDS = 60.0
"""Time in seconds in which a node must send, or ask for, the folder's name."""


def _scratch_of_here() -> str:
    """Return the prefix of the names of scratch folders that processes of this machine or container make."""
    return f"scratch-{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _remove_abandoned(results: Path) -> None:
    """Remove the scratch folders of processes of this machine that are gone: they were killed."""
    start = _scratch_of_here()
    for folder in results.glob(f"{glob.escape(start)}*"):
        pid = folder.name.removeprefix(start).partition("-")[0]
        if pid.isdecimal() and not process_state(int(pid)) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


class Scratch:
    """A folder with a unique name that only its user can open (mode 0700), because its files are unpickled."""

    def __init__(self, results: Path, cluster: Cluster) -> None:
        """Make the folder, with a name that node 0 chooses. A call of all nodes.

        Raises `ResultsError` when `results` cannot be written.
        """
        spec, results = cluster.spec, results.absolute()  # ranks may start elsewhere
        try:
            results.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(results)
            prefix = f"{_scratch_of_here()}{os.getpid()}-"
            own = tempfile.mkdtemp(prefix=prefix, dir=results) if spec.node_rank == 0 else ""
            name = Path(own).name
            with _undone(own):
                if spec.nnodes > 1:
                    name = cluster.exchange("scratch", name, seconds=_ANSWER_SECONDS)[0]
                self.folder = results / name
                self._cluster, self._blind = cluster, self._find_blind(cluster, self.folder.is_dir())
            self._made = bool(own)
            if not own:
                with contextlib.suppress(FileExistsError):  # as it does where the nodes share their results
                    self.folder.mkdir(mode=0o700)
                    self._made = True
        except OSError as error:
            raise ResultsError(
                f"results folder {str(results)!r}: {error.strerror}; name another with --results"
            ) from error

    @property
    def missing(self) -> list[int]:
        """Numbers of the remaining nodes that do not see the folder that node 0 made."""
        return [node for node in self._blind if node in self._cluster.numbers]

    @staticmethod
    def _find_blind(cluster: Cluster, here: bool) -> list[int]:
        if cluster.spec.nnodes == 1:
            return []
        seen = cluster.exchange("scratch seen", "yes" if here else "no", seconds=_ANSWER_SECONDS)
        return [node for node, answer in zip(cluster.numbers, seen, strict=True) if answer == "no"]

    def checkpoint(self, base: Case, scenario: str) -> Path:
        """Return the folder for the checkpoint of `scenario` of `base`. All nodes share it."""
        folder = self.folder / hashlib.sha256(repr((base, scenario)).encode()).hexdigest()[:16]
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ResultsError(f"{str(folder)!r} cannot be made: {error.strerror}; did its results move?") from error
        return folder

    def remove(self) -> None:
        """Remove the folder, on the node that made it."""
        if self._made:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _undone(own: str) -> Iterator[None]:
    """Remove the folder `own` (if this node made one) if the block fails: other nodes cannot be told of it."""
    try:
        yield
    except BaseException:
        if own:
            shutil.rmtree(own, ignore_errors=True)
        raise


# --- Where the nodes of a run meet before they act.

READY_SECONDS = 300.0
"""How long nodes wait for one that is late, before ranks start: it may import from a slow disk."""
_OWN = ("checkpoint", "peak_flops_per_second")
"""Fields of a request that nodes need not agree on: a path, and a number that each node measures."""
_SHOWN = 40
"""Longest value, in characters, that a message contains. A longer value is replaced by a digest."""


def meet(cluster: Cluster, request: Request, trouble: Exception | None = None) -> None:
    """Wait until all nodes are about to run the same request.

    `trouble` is an error that keeps this node from running it. It is raised on every node. Raises `NodesDisagreeError`
    when a node has another request, code, packages, data or noise floor.
    """
    compared = not trouble and request.task is not Task.LINKS  # links are also measured between nodes that differ
    facts = {**_facts(request), **_gpus(request, cluster.spec)} if compared else {}
    mine = {"facts": facts, "trouble": _encode_error(trouble)}
    nodes = [json.loads(text) for text in cluster.exchange("launch", json.dumps(mine), seconds=READY_SECONDS)]
    if trouble:
        raise trouble
    named = dict(zip(cluster.numbers, nodes, strict=True))
    _raise_theirs(named)
    _expect_equal({number: node["facts"] for number, node in named.items()})


def from_node_0(cluster: Cluster, what: str, make: Callable[[], str], *, seconds: float) -> str:
    """Return on every node what node 0 makes, or raise the error it met there. The others wait at most `seconds`."""
    trouble, made = None, ""
    if cluster.spec.node_rank == 0:
        try:
            made = make()
        except Exception as error:
            trouble = error
    mine = json.dumps({"made": made, "trouble": _encode_error(trouble)})
    first = json.loads(cluster.exchange(what, mine, seconds=seconds + READY_SECONDS)[0])
    if trouble:
        raise trouble
    _raise_theirs({0: first})
    return str(first["made"])


def _encode_error(trouble: Exception | None) -> list[str] | None:
    if trouble is None:
        return None
    text = str(trouble) if isinstance(trouble, MeshmarkError) else f"{type(trouble).__name__}: {trouble}"
    return [NoSpaceError.__name__ if isinstance(trouble, NoSpaceError) else MeshmarkError.__name__, text]


def _raise_theirs(nodes: Mapping[int, Mapping[str, Any]]) -> None:
    for number, node in nodes.items():
        if node["trouble"]:
            kind, text = node["trouble"]
            raise (NoSpaceError if kind == NoSpaceError.__name__ else MeshmarkError)(f"node {number}: {text}")


def _expect_equal(nodes: Mapping[int, Mapping[str, str]]) -> None:
    names = dict.fromkeys(name for facts in nodes.values() for name in facts)
    told = []
    for name in names:
        values = {number: facts.get(name, "none") for number, facts in nodes.items()}
        if len(set(values.values())) > 1:
            told.append(f"{name} ({', '.join(f'{value} on node {number}' for number, value in values.items())})")
    if told:
        raise NodesDisagreeError(
            f"the nodes disagree about {'; '.join(told)}: give each the same command, code, packages, data and GPUs"
        )


def _facts(request: Request) -> dict[str, str]:
    """Return all that must be equal on every node, by name. Paths may differ, but not what is read from them."""
    asked = encode(request)
    for case in (asked["case"], asked["base"]):
        if case:
            case["workload"]["corpus"] = None
    facts = {"case": request.case.id, "data": _digest(data_digest(request.case.workload))}
    facts |= {f"request's {name}": _shown(value) for name, value in asked.items() if name not in _OWN}
    facts |= {f"version of {name}": version for name, version in versions().items()}
    for each in load_adapter(request.adapter).requires:
        facts[f"version of {each.distribution}"] = installed(each.distribution) or "none"
    facts |= {"code of Meshmark": code_digest()}
    facts |= {"code of the adapter and of what it imports": code_digest_of(request.adapter)[:12]}
    if isinstance(own := request.case.workload.model, OwnModelConfig):
        facts |= {"code of the workload and of what it imports": code_digest_of(own.target)[:12]}
    return facts


def _gpus(request: Request, spec: ClusterSpec) -> dict[str, str]:
    """Return the number of GPUs that the ranks can use, for comparison between nodes.

    On a node with fewer GPUs than the others, ranks would share them. NCCL refuses that, and it would distort times.
    """
    if request.device != "cuda":
        return {}
    ranks = request.case.world_size // (spec.nnodes if spec.gpus_by_task else spec.num_hosts)
    return {f"GPUs that {ranks} ranks can use": str(min(ranks, num_gpus()))}


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def code_digest() -> str:
    package = Path(meshmark.__file__).parent
    files = sorted(package.rglob("*.py"))
    return _digest("".join(f"{file.relative_to(package)}\n{file.read_text()}" for file in files))


# --- Facts that a scheduler gives this process.

_PORTS = 20000
"""First port for jobs of SLURM, and the number of ports for them."""
_STEP_APART = 4999
"""Distance between ports of two steps of a job, so that steps and consecutive jobs use different ports."""


def cluster_of(
    environ: Mapping[str, str], *, nnodes: int | None = None, node_rank: int | None = None, rdzv: str | None = None
) -> ClusterSpec:
    """Return this launcher's specification from torchrun's or SLURM's variables, and from the given options.

    Without either, it is that of a single node. Raises `InputError` if they contradict each other.
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
        raise InputError(
            f"--node-rank {node_rank}, but this command was started as node {told.node_rank}: leave out --node-rank"
        )
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
    """Return the switches in SLURM's topology address, or an empty string if there are none.

    The address `top.leaf.node` with the pattern `switch.switch.node` gives `top.leaf`.
    """
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count("switch")
    return ".".join(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:levels])


def _tasks_here(environ: Mapping[str, str], default: int) -> int:
    """The number of tasks on every node, where SLURM says so with one number (`2(x4)`)."""
    said = re.fullmatch(r"(\d{1,5})(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", str(default)))
    return int(said[1]) if said else 0


def _even(starter: str, tasks: int, hosts: int, each: int) -> int:
    """Return the number of tasks per node. Raises `InputError` unless it is the same on every node."""
    if not each or hosts * each != tasks:
        raise InputError(
            f"{starter} has started {tasks} tasks on {hosts} nodes, not as many on each: give every node one task, or "
            "one a GPU (srun --ntasks-per-node)"
        )
    return each


def _expect_srun(environ: Mapping[str, str]) -> None:
    """Raise `InputError` in a job of several nodes outside a job step, where all other nodes would be idle."""
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
