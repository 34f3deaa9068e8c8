"""The nodes of one run: who they are, and how their launchers talk to each other.

Every node runs the same pytest command. Node 0's process serves one key-value store for the whole run; each launch is a
rendezvous under a prefix of its own, and launchers exchange what their ranks left, so that every node sees the same.
A single node needs none: its launches meet in a file that this user alone can open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import ClusterError, InputError, NodeLostError, NodesDisagreeError, UnknownNameError
from meshmark.launch.store import SILENT_SECONDS, RunStore, StoreServer, run_secret
from meshmark.text import pluralize

# --- Lost nodes.


class NodeLoss(StrEnum):
    """Policy for a lost node."""

    END = "end"
    """End the run, in good order."""
    CONTINUE = "continue"
    """Go on with the nodes that are left, and the cases that fit them; node 0 must be one, for it has the records."""


def node_loss(text: str) -> NodeLoss:
    """Raises `UnknownNameError`."""
    if text not in [*NodeLoss]:
        raise UnknownNameError("--on-node-loss", text, list(NodeLoss))
    return NodeLoss(text)


def rank_room(device: str, num_gpus: int) -> int:
    """Ranks that this node can hold: one a GPU, or a core."""
    return num_gpus if device == "cuda" else len(os.sched_getaffinity(0))


# --- Waiting for other nodes.

_POLL_SECONDS = 0.02
_SAY_SECONDS = 10.0


class Waiting:
    """A wait that says so from time to time, and has an end."""

    def __init__(self, say: Callable[[str], None], seconds: float) -> None:
        self._say = say
        self._started = self._said = time.monotonic()
        self._seconds = seconds

    def over(self, text: str) -> bool:
        """A moment later: whether the wait has taken too long. `text`: what is waited for."""
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - self._said > _SAY_SECONDS:
            self._said = now
            self._say(f"{text}, {now - self._started:.0f} s of {self._seconds:.0f}")
        return now - self._started > self._seconds


# --- Node 0's listening socket.

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address of `--rdzv` alone. Raises `ClusterError` when that cannot be had, or is one that no other
    node reaches."""
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
"""For a node that lives to say where it stands when another is lost."""
_END = "end"


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Which node this is. Raises `InputError` when the numbers contradict each other."""

    nnodes: int = 1
    """Launchers of the run: one a node, or each of the tasks that a scheduler starts there."""
    node_rank: int = 0
    rdzv: str | None = None
    """HOST:PORT of node 0; needed for more than one node."""
    tasks_per_node: int = 1
    """Launchers on one host."""
    local_task: int = 0
    """Which of them this is."""
    gpus_by_task: bool = False
    """Whether each task sees GPUs of its own."""
    host_number: int | None = None
    """Which host this is, where a scheduler says so: it need not give neighbours to one."""
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
        return self.rdzv.rpartition(":")[0] if self.rdzv else "127.0.0.1"

    @property
    def port(self) -> int:
        """0 when there is none."""
        return int(self.rdzv.rpartition(":")[2]) if self.rdzv else 0

    @property
    def num_hosts(self) -> int:
        return self.nnodes // self.tasks_per_node

    def among(self, node_rank: int, nnodes: int) -> ClusterSpec:
        """This one where so many launchers are left, whole nodes of them, as number `node_rank`."""
        if nnodes == 1:  # it needs no address, and the way to the others may be gone
            return ClusterSpec(gpus_by_task=self.gpus_by_task, host_number=self.node, switch=self.switch)
        return dataclasses.replace(self, nnodes=nnodes, node_rank=node_rank, host_number=self.node)

    @property
    def node(self) -> int:
        """Which host this is."""
        return self.node_rank // self.tasks_per_node if self.host_number is None else self.host_number

    @property
    def text(self) -> str:
        """How many there are, in words."""
        nodes = pluralize(self.num_hosts, "node")
        return f"{self.nnodes} tasks on {nodes}" if self.tasks_per_node > 1 else nodes


class Cluster:
    """The running nodes. Use as a context manager."""

    def __init__(self, spec: ClusterSpec, say: Callable[[str], None] = lambda text: None) -> None:
        """`say`: told what is waited for."""
        self.spec, self._say = spec, say
        """Specification of the cluster of the nodes that are left."""
        self._id, self._all = spec.node_rank, list(range(spec.nnodes))
        self._members = self._all
        """Nodes keep the numbers that they began with, in signs of life, at meetings, and where they are named."""
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
        """Ranks that each node can hold; None as long as none is lost: their user knows better."""

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
                self._store.beat(self._id)  # who is lost before the first thread's would be missed by nobody
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
                with contextlib.suppress(ClusterError):  # whoever is there yet need not wait
                    self._store.set(self._seat(self._id), json.dumps([_END, ""]))
            elif self._store:
                self._leave(self._store)
        finally:
            self._close()

    def _leave(self, store: RunStore) -> None:
        """Node 0 serves the store: it leaves last. A node that is lost by now takes nothing with it, but for node 0."""
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
        """Node 0's store, as soon as it is there. Raises `ClusterError` when it is not in time."""
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
        """Give signs of life, and note whose are missing."""
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
        """The store. Raises `NodeLostError` when a node is lost."""
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
        """Raises `NodeLostError` when a node is lost."""
        return self._check().check([key])

    def exchange(self, what: str, value: str, *, seconds: float) -> list[str]:
        """The value of every node, by node rank, at a meeting of all: each comes to its first, second ... in turn.

        Raises `NodeLostError` when a node is lost or does not come in time, `NodesDisagreeError` when one comes for
        something else.
        """
        self._meetings += 1
        seats = {self._seat(node): f"node {node} of {len(self._all)}" for node in self._members}
        self._check().set(self._seat(self._id), json.dumps([what, value]))
        self._await(seats, what, seconds)
        told = self._check().get_all([*seats])  # one question, or as many nodes as there are would ask as many each
        return [self._expect(name, what, json.loads(text)) for name, text in zip(seats.values(), told, strict=True)]

    def regroup(self, place: str, room: int, *, seconds: float) -> None:
        """Go on without the nodes that are lost: with those that come to say that they stand at the same `place`, by
        node 0's decision, for which the others wait for `seconds`.

        Raises `ClusterError` when node 0 is lost, or this node is none of them.
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
            raise ClusterError(f"{self._lost}, and without node {self._id} goes on who is left: {left or 'nobody'}")
        self._say(f"{self._lost}: going on with node {', '.join(map(str, left))}")
        with self._losing:
            self._members, self._lost = left, ""
        self._launches = self._meetings = 0
        self.spec = self.spec.among(left.index(self._id), len(left))

    def _choose(self, place: str) -> tuple[list[int], int]:
        """The nodes, of those that came in time and stand where this one does, all of whose tasks do; and the ranks
        that each can hold."""
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
        if 0 not in left:  # all records and all that nodes know of each other are with it
            return [], 0
        return left, min(told[node][1] for node in left)

    def _seat(self, node: int) -> str:
        return f"meeting{self._regroups}.{self._meetings}/{node}"

    def _await(self, seats: Mapping[str, str], what: str, seconds: float) -> None:
        """Until everyone has come."""
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
            raise NodesDisagreeError(f"{name} is at {theirs!r}, this one at {what!r}: give each the same command")
        return str(value)
