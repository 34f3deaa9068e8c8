"""The nodes of one run: who they are, and how their launchers talk to each other.

Every node runs the same pytest command. Node 0's process hosts one key-value store for the whole run; each launch is a
rendezvous under a prefix of its own, and launchers exchange what their ranks left, so that every node sees the same.
"""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import DistError, DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from meshmark.errors import ClusterError, InputError

_JOIN_SECONDS = 300
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Which node this is. Raises `InputError` when the numbers contradict each other."""

    nnodes: int = 1
    node_rank: int = 0
    rdzv: str | None = None
    """HOST:PORT of node 0; needed for more than one node."""

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise InputError(
                f"--node-rank {self.node_rank} with --nnodes {self.nnodes}: expected 0 to {self.nnodes - 1}"
            )
        if self.nnodes > 1 and self.rdzv is None:
            raise InputError(
                f"--nnodes {self.nnodes} needs --rdzv HOST:PORT, an address of node 0 and a free port there"
            )
        if self.rdzv is not None and not self.rdzv.rpartition(":")[2].isdigit():
            raise InputError(f"--rdzv {self.rdzv!r}: expected HOST:PORT")

    @property
    def host(self) -> str:
        return self.rdzv.rpartition(":")[0] if self.rdzv else "127.0.0.1"

    @property
    def port(self) -> int:
        """0 lets the system choose."""
        return int(self.rdzv.rpartition(":")[2]) if self.rdzv else 0

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> ClusterSpec:
        """From torchrun's or SLURM's environment; a single node when there is neither."""
        if "GROUP_RANK" in environ and "LOCAL_WORLD_SIZE" in environ:
            nnodes = int(environ["WORLD_SIZE"]) // int(environ["LOCAL_WORLD_SIZE"])
            port = int(environ["MASTER_PORT"]) + 1  # torchrun's own store listens on MASTER_PORT
            return cls(nnodes=nnodes, node_rank=int(environ["GROUP_RANK"]), rdzv=f"{environ['MASTER_ADDR']}:{port}")
        nnodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
        if nnodes > 1:
            port = 20000 + int(environ["SLURM_JOB_ID"]) % 20000
            host = _first_host(environ["SLURM_STEP_NODELIST"])
            return cls(nnodes=nnodes, node_rank=int(environ["SLURM_NODEID"]), rdzv=f"{host}:{port}")
        return cls()


def _first_host(nodelist: str) -> str:
    """First host of SLURM's compressed list, as scontrol expands it."""
    shown = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True)
    return shown.stdout.split()[0]


class Cluster:
    """The running nodes. Use as a context manager."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self._launches = {True: 0, False: 0}

    def __enter__(self) -> Cluster:
        spec = self.spec
        if spec.host in LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            self.store = TCPStore(
                spec.host,
                spec.port,
                is_master=spec.node_rank == 0,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=_JOIN_SECONDS),
            )
        except (DistError, RuntimeError) as error:
            raise ClusterError(
                f"node {spec.node_rank} of {spec.nnodes} found no store at {spec.host}:{spec.port}: is node 0 running, "
                f"and is the port free and open? ({error})"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self.spec.nnodes > 1:  # node 0 hosts the store: it leaves last
            self.exchange("end", "", seconds=30)
            if self.spec.node_rank:
                self.store.set(f"left/{self.spec.node_rank}", "")
            else:
                self.store.wait([f"left/{n}" for n in range(1, self.spec.nnodes)], datetime.timedelta(seconds=30))

    @property
    def port(self) -> int:
        return int(self.store.port)

    def new_prefix(self, *, alone: bool) -> str:
        """Of the keys of a launch, used by no other: the same on every node, or of this node `alone`."""
        self._launches[alone] += 1
        return f"alone{self.spec.node_rank}/{self._launches[alone]}" if alone else f"launch{self._launches[alone]}"

    def announce(self, key: str) -> None:
        """Tell all nodes that `key` has happened."""
        self.store.set(key, "1")

    def happened(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def exchange(self, key: str, value: str, *, seconds: float) -> list[str]:
        """The value of every node under `key`, by node rank.

        Raises `ClusterError` when a node's is not there in time.
        """
        self.store.set(f"{key}/{self.spec.node_rank}", value)
        found = []
        for node in range(self.spec.nnodes):
            try:
                self.store.wait([f"{key}/{node}"], datetime.timedelta(seconds=seconds))
                found.append(self.store.get(f"{key}/{node}").decode())
            except (DistStoreError, DistNetworkError, RuntimeError) as error:
                raise ClusterError(
                    f"node {node} of {self.spec.nnodes} did not answer within {seconds:.0f} s at {key!r}: "
                    "did its pytest command end, or was it given other options?"
                ) from error
        return found
