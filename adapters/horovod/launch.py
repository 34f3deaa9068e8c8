"""Horovod within processes that it did not start: what `horovodrun` would have told each of them."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from meshmark.adapter.engine import RankContext
from meshmark.judge.trace import all_gather_json


def join(context: RankContext, variables: dict[str, str]) -> Callable[[], None]:
    """Start Horovod over gloo among all ranks, under `variables` of its own; what ends it again.

    As `horovodrun --gloo` does it (horovod/runner/gloo_run.py): a server of rendezvous beside the first rank, and its
    address, the controller and the rank's place in the environment.
    """
    import horovod.torch as hvd
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    plan = assignments(all_gather_json(socket.gethostname()))
    server, address = None, ["", 0]
    if context.rank == 0:
        server = RendezvousServer()
        address = [os.environ.get("MASTER_ADDR", "127.0.0.1"), server.start()]
        server.init(plan)
    address = all_gather_json(address)[0]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    run = create_run_env_vars(address[0], [interface], address[1])
    os.environ.update({name: str(value) for name, value in run.items()} | create_slot_env_vars(plan[context.rank]))
    os.environ.update(variables)
    hvd.init()

    def leave() -> None:
        hvd.shutdown()
        dist.barrier()  # the server answers until all have left
        if server:
            server.stop()

    return leave


def assignments(hosts: Sequence[str]) -> list[Any]:
    """Horovod's places (`SlotInfo`) of all ranks, whose hosts come in the order of ranks."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    slots = [HostInfo(name, len(list(ranks))) for name, ranks in itertools.groupby(hosts)]
    found: list[Any] = get_host_assignments(slots, len(hosts), len(hosts))
    return found
