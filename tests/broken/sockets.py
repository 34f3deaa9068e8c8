"""Data parallelism over a communication library of its own, which PyTorch sees nothing of: two ranks and a socket."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Adapter, Capabilities
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext, TrafficSource, Transfer, initial_model
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case


class SocketLibrary:
    """Two ranks, one collective, and a log of what was really sent."""

    def __init__(self, rank: int, address: Path) -> None:
        self.rank, self.sent_bytes = rank, list[int]()
        if rank == 0:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(address))
            listener.listen()
            self.peer = listener.accept()[0]
            listener.close()
            return
        self.peer = socket.socket(socket.AF_UNIX)
        while True:
            try:
                return self.peer.connect(str(address))
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01)

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over both ranks, in place, of a tensor on the CPU."""
        own = tensor.contiguous().numpy().tobytes()
        theirs = self._swap(own)
        tensor.add_(torch.frombuffer(theirs, dtype=tensor.dtype).view_as(tensor))
        self.sent_bytes.append(len(own))

    def _swap(self, own: bytes) -> bytearray:
        if self.rank == 0:
            self.peer.sendall(own)
        theirs = bytearray()
        while len(theirs) < len(own):
            part = self.peer.recv(len(own) - len(theirs))
            assert part, "the other rank is gone"
            theirs += part
        if self.rank == 1:
            self.peer.sendall(own)
        return theirs


class SocketTraffic:
    """Reads the library's log."""

    def __init__(self, library: SocketLibrary) -> None:
        self.library, self.begun = library, 0
        self.counted: list[int] = []

    def start(self) -> None:
        self.begun = len(self.library.sent_bytes)

    def stop(self) -> None:
        self.counted += self.library.sent_bytes[self.begun :]

    def requested(self) -> list[Transfer]:
        return [Transfer(kind="all_reduce", ranks=(0, 1), num_bytes=count) for count in self.counted]

    def issued(self) -> list[Transfer]:
        return self.requested()


class SocketEngine(DataParallelEngine):
    library: SocketLibrary
    times = 1
    """That gradients are sent."""

    def finish_gradients(self) -> None:
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            for _ in range(self.times - 1):
                self.library.all_reduce(parameter.grad.clone())
            self.library.all_reduce(parameter.grad)
            parameter.grad /= 2
        super().finish_gradients()

    def traffic_source(self) -> TrafficSource | None:
        return SocketTraffic(self.library)


class Sockets(Adapter):
    capabilities: ClassVar = Capabilities(degrees=frozenset({"dp"}))
    engine: ClassVar[type[SocketEngine]] = SocketEngine

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, context.device)
        engine = self.engine(case, context, model, build_optimizer(case.workload.optimizer, model.named_parameters()))
        engine.library = SocketLibrary(context.rank, context.scratch / "library")
        return engine


class SendsTwice(Sockets):
    """The same gradients, for twice the traffic."""

    class engine(SocketEngine):  # noqa: N801
        times = 2


class TellsNothing(Sockets):
    """Its traffic is nowhere to be seen."""

    class engine(SocketEngine):  # noqa: N801
        def traffic_source(self) -> TrafficSource | None:
            return None
