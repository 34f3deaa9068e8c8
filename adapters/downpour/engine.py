"""A model replica, which steps alone, and pushes to and fetches from the server as often as it is told to."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from meshmark.adapter.engine import DataParallelEngine, Holdings, RankContext, TrafficSource
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.adapters.downpour import server
from meshmark.adapters.downpour.sent import PickledCalls
from meshmark.algorithms.downpour import Downpour
from meshmark.spec.case import Case

SERVER = 0
"""The rank in whose process it lives."""
_BUILT = itertools.count()


def rpc_options(meeting: Path, *, num_threads: int) -> rpc.TensorPipeRpcBackendOptions:
    """Return options by which ranks meet in the file `meeting` and call one another.

    Ranks of one node use shared memory alone. PyTorch's transport by TCP listens on a port, and whatever is sent there
    ends the process: it allocates as many bytes as a stranger's first message names (`std::bad_alloc`). Calls have no
    time limit, for the server knows whom it waits for.
    """
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") and sys.platform == "linux"
    return rpc.TensorPipeRpcBackendOptions(
        init_method=meeting.absolute().as_uri(),
        rpc_timeout=0,
        num_worker_threads=num_threads,
        _transports=["shm"] if one_node else None,
        _channels=["basic"] if one_node else None,
    )


class DownpourEngine(DataParallelEngine):
    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        spec = case.workload.algorithm_as(Downpour).server
        self.spec, self.steps_done = spec, 0
        self.trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.gathered = [torch.zeros_like(p) for p in self.trained]
        """Gradients that are yet to be pushed."""
        self.told: tuple[int | None, int | None] = (None, None)
        self.name = f"downpour-{next(_BUILT)}"
        self.server = server.Server(spec, self.trained, case.layout.dp) if context.rank == SERVER else None
        if self.server:
            server.HERE[self.name] = self.server
        # A replica makes one call at a time, and its push may wait. More threads would take longer to warm up.
        options = rpc_options(context.scratch / self.name, num_threads=case.layout.dp + 1)
        with warnings.catch_warnings():  # PyTorch's RPC calls what PyTorch has deprecated
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                str(context.rank), rank=context.rank, world_size=context.world_size, rpc_backend_options=options
            )

    @torch.no_grad()
    def update(self) -> Tensor | None:
        self.gather()
        norm = super().update()
        made = self.push() if self.spec.pushes_after(self.steps_done) else None
        fetched = self.fetch() if self.spec.fetches_after(self.steps_done) else None
        self.told = made, fetched
        self.steps_done += 1
        return norm

    def gather(self) -> None:
        torch._foreach_add_(self.gathered, [p.grad for p in self.trained if p.grad is not None])

    def push(self) -> int:
        """Push the gathered gradients, and return the server's new version."""
        made: int = self.call(server.push, self.gathered)
        torch._foreach_zero_(self.gathered)
        return made

    def fetch(self) -> int:
        """Copy the server's weights, and return their version."""
        version: int
        weights: list[Tensor]
        version, weights = self.call(server.fetch)
        torch._foreach_copy_(self.trained, weights)
        return version

    def call(self, function: Any, *given: Any) -> Any:  # noqa: ANN401
        return rpc.rpc_sync(str(SERVER), function, args=(self.name, self.dp_rank, *given))

    def server_versions(self) -> tuple[int | None, int | None] | None:
        return self.told

    def traffic_source(self) -> TrafficSource | None:
        return PickledCalls(self.context.rank, SERVER)

    def holdings(self) -> Holdings:
        held = super().holdings()
        served = self.server.held().optimizer_states if self.server else []
        return dataclasses.replace(held, optimizer_states=[*held.optimizer_states, *self.gathered, *served])

    def save(self, folder: Path) -> None:
        """Save this replica's state. The barrier ensures that no push is in flight."""
        dist.barrier()
        save_local(folder, self.state())

    def load(self, folder: Path) -> None:
        self.load_state(load_local(folder))
        dist.barrier()

    def state(self) -> dict[str, Any]:
        served = self.server.state() if self.server else None
        return super().state() | {"steps": self.steps_done, "gathered": self.gathered, "server": served}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steps_done = state["steps"]
        torch._foreach_copy_(self.gathered, state["gathered"])
        if self.server:
            self.server.load_state(state["server"])

    def close(self) -> None:
        """Shut RPC down. No replica may call the server any more."""
        rpc.shutdown()
        server.HERE.pop(self.name, None)
