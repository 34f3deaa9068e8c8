"""Traffic through Horovod's library, recorded where its Python calls its C++."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from meshmark.adapter.engine import Transfer
from meshmark.errors import TrafficError

_PREFIX, _INFIX = "horovod_torch_", "_async_"
_KINDS = {"allreduce": "all_reduce", "broadcast": "broadcast", "reducescatter": "reduce_scatter"}
"""Calls whose argument is the full tensor. In this adapter Horovod calls no others."""


class HorovodTraffic:
    """Traffic of this rank's calls into `horovod.torch.mpi_lib_v2`, whoever makes them.

    Horovod's own log, its timeline, covers only the first rank. Tests compare the two.

    How Horovod joins tensors in its fusion buffer is not recorded. `issued` therefore equals what was asked for, which
    is right if HOROVOD_FUSION_THRESHOLD is 0.
    """

    def __init__(self, world_size: int) -> None:
        from horovod.torch import mpi_ops

        self._ops, self._ranks = mpi_ops, tuple(range(world_size))
        self._transfers: list[Transfer] = []
        self._library: ModuleType = mpi_ops.mpi_lib

    def start(self) -> None:
        self._ops.mpi_lib = _Watched(self._library, self._note)

    def stop(self) -> None:
        self._ops.mpi_lib = self._library

    def requested(self) -> list[Transfer]:
        return self._transfers

    def issued(self) -> list[Transfer]:
        return self._transfers

    def _note(self, name: str, tensors: Tensor | list[Tensor], process_set: int) -> None:
        operation = name.removeprefix(_PREFIX).partition(_INFIX)[0].removeprefix("grouped_")
        if operation not in _KINDS or process_set:
            raise TrafficError(f"the call {name} over the process set {process_set} is none that Meshmark knows")
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            self._transfers.append(Transfer(kind=_KINDS[operation], ranks=self._ranks, num_bytes=tensor.nbytes))


class _Watched:
    """Proxy of the library that reports every asynchronous call."""

    def __init__(self, library: ModuleType, note: Any) -> None:  # noqa: ANN401
        self._library, self._note = library, note

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self._library, name)
        if _INFIX not in name:
            return found

        def call(*arguments: Any) -> Any:  # noqa: ANN401
            self._note(name, arguments[0], _process_set(name, arguments))
            return found(*arguments)

        return call


def _process_set(name: str, arguments: tuple[Any, ...]) -> int:
    """Its number is the last argument, but before the two scales of a reduce-scatter (horovod/torch/mpi_ops.py)."""
    return int(arguments[-3 if "reducescatter" in name else -1])
