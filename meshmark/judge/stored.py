"""Store a run's tensors on disk if they do not fit in memory.

They are written one by one as they are read from an engine, and read one by one for judging. While an engine is alive,
judging it needs one whole tensor besides what it holds, and that tensor's copy on the host.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from meshmark import rank_progress
from meshmark.adapter.engine import Engine
from meshmark.judge.deviation import Drift, QuantityKind
from meshmark.judge.engine_tensors import NamedTensors, full_gradients, full_parameters
from meshmark.judge.gather import all_gather_json, device_of_default_group
from meshmark.judge.trace import Trace, digest, drifts_between, host_copy, union_of
from meshmark.spec.workload import Workload


class StoredTensors(Mapping[str, NDArray[np.floating]]):
    """Tensors by name. Each is read from its file on access, and not cached."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for these tensors only. It is created, or emptied if it exists."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self._names: dict[str, None] = {}

    def __getitem__(self, name: str) -> NDArray[np.floating]:
        if name not in self._names:
            raise KeyError(name)
        value: NDArray[np.floating] = np.load(self._path(name), allow_pickle=False)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def write(self, name: str, value: NDArray[np.floating]) -> None:
        np.save(self._path(name), np.ascontiguousarray(value), allow_pickle=False)
        self._names[name] = None

    def remove(self, name: str) -> None:
        del self._names[name]
        self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"


def stored_copies(tensors: Mapping[str, Tensor], folder: Path) -> StoredTensors:
    """Write all `tensors` to a new folder."""
    found = StoredTensors(folder)
    for name, tensor in tensors.items():
        found.write(name, host_copy(tensor, shared=True))
    return found


class DiskNotebook:
    """Notes of all ranks together, which hold one state, on disk.

    They are whole on rank 0, with each tensor from the lowest rank that reports it. All methods are collective calls.
    """

    def __init__(self, folder: Path, around: AbstractContextManager[None] | None = None) -> None:
        """`folder` is this rank's own. The context `around` is entered whenever an engine's tensors are gathered."""
        self.folder, self.around = folder, around or nullcontext()
        self.digests: dict[QuantityKind, list[dict[str, str]]] = {}
        """Digests of what this rank reported, by step and name."""

    def parameters(self, engine: Engine, workload: Workload, step: int) -> StoredTensors:
        with self.around:
            return self._take(QuantityKind.PARAMETERS, step, full_parameters(engine, workload))

    def gradients(self, engine: Engine, workload: Workload, step: int) -> StoredTensors:
        with self.around:
            return self._take(QuantityKind.GRADIENTS, step, full_gradients(engine, workload))

    @torch.no_grad()
    def _take(self, kind: QuantityKind, step: int, named: NamedTensors) -> StoredTensors:
        names, told = named
        everyone: list[list[str]] = all_gather_json(names)
        owners = {name: rank for rank, its in reversed(list(enumerate(everyone))) for name in its}
        found, digests, rank = StoredTensors(self.folder / f"{kind}-{step}"), dict[str, str](), dist.get_rank()
        for name, tensor in told:
            value = host_copy(tensor, shared=True)
            digests[name] = digest(value)
            if owners[name] == rank:
                found.write(name, value)
            del tensor, value  # the next takes their room
        noted = self.digests.setdefault(kind, [])
        noted[step:] = [digests]  # a step that loss scaling left out is told again
        _send_to_first(found)
        return found

    def gather(self, own: Trace) -> tuple[list[Trace], list[Drift], int]:
        """Like `gather_replicas` for one replica. `own.parameters` and `own.gradients` are results of this class."""
        rank_progress.begin(rank_progress.Phase.GATHER)
        kinds = (QuantityKind.PARAMETERS, QuantityKind.GRADIENTS)
        numbers = [own.losses, own.norms, own.evaluations, own.left_out, own.loss_scales]
        everyone = all_gather_json([numbers, [self.digests.get(kind, []) for kind in kinds]])
        if dist.get_rank():
            return [], [], 0
        drifts = [
            drift
            for i, kind in enumerate(kinds)
            for drift in drifts_between(kind, {rank: digests[i] for rank, (_, digests) in enumerate(everyone)})
        ]
        fields = ("losses", "norms", "evaluations", "left_out", "loss_scales")
        union = union_of([Trace(**dict(zip(fields, numbers, strict=True))) for numbers, _ in everyone])
        union.parameters, union.gradients = own.parameters, own.gradients
        num_told = sum(len(tensors) for _, digests in everyone for steps in digests for tensors in steps)
        num_held = sum(len(tensors) for tensors in [*own.parameters, *own.gradients])
        return [union], drifts, num_told - num_held


def _send_to_first(own: StoredTensors) -> None:
    """Send what other ranks have written to rank 0, tensor by tensor."""
    rank, device = dist.get_rank(), device_of_default_group()
    forms = {} if rank == 0 else {name: [str(own[name].dtype), list(own[name].shape)] for name in own}
    for sender, told in enumerate(all_gather_json(forms)):
        for name, (dtype, shape) in told.items():
            if rank == sender:
                dist.send(torch.from_numpy(own[name]).to(device), 0)
                own.remove(name)
            elif rank == 0:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                dist.recv(tensor, sender)
                own.write(name, tensor.cpu().numpy())
