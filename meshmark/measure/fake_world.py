"""Run one process as one rank of a world of any size, with a process group whose other ranks do not exist.

PyTorch's fake process group performs no collectives, so DDP's reducer and gathers of objects fail on it. Here every
collective returns at once with a result: a reduction gives this rank's values, a gather repeats this rank's part, and a
received message is zeros. Sizes, control flow and memory are therefore those of the real world, but computed numbers
are meaningless.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils.weak import TensorWeakRef

from meshmark.measure.flight_recorder import IssuedOperation

BACKEND = "fake"
"""PyTorch's name of the backend."""


class Copies(StrEnum):
    """Buffers that a backend allocates while a collective runs, which count in a step's peak."""

    GLOO = "gloo"
    """Gathers into a flat tensor of all parts, and reduces in a copy of the whole, on the host."""
    NCCL = "nccl"
    """Reads and writes the given tensors directly; lists of tensors go through a flat one."""


class _Reduced(Work):
    """A finished all-reduce whose future holds its tensors, as DDP's reducer requires.

    PyTorch keeps only the C++ half alive, so the caller must keep this object. It refers to tensors weakly, because a
    backend releases them when the call is over.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = [TensorWeakRef(tensor) for tensor in tensors]

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor | None]]:
        future: torch.futures.Future[list[Tensor | None]] = torch.futures.Future()
        future.set_result([tensor() for tensor in self._tensors])
        return future


class _Holding(Work):
    """A finished call that holds tensors for as long as its caller keeps it.

    It is kept alive by its maker until somebody waits for it, which happens through the C++ half.
    """

    def __init__(self, tensors: Sequence[Tensor], kept: set[Work]) -> None:
        super().__init__()
        self._tensors, self._kept = tensors, kept
        kept.add(self)

    def wait(self, timeout: object = None) -> bool:
        self._kept.discard(self)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


@contextlib.contextmanager
def fake_world(rank: int, world_size: int, copies: Copies) -> Iterator[list[IssuedOperation]]:
    """Create a default process group of `world_size` ranks in which this process is `rank`, alone.

    Yields a growing list of the collectives that were performed; messages are recorded by `Ends`. The process must not
    have a process group yet and must exit afterwards, because PyTorch's own kernels are replaced permanently.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kernels = _Kernels(copies)
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name, kernel in kernels.by_name().items():
            for key in ("CPU", "CUDA"):
                library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=FakeStore())
    ISSUED.append(kernels.issued)
    try:
        yield kernels.issued
    finally:
        ISSUED.remove(kernels.issued)
        dist.destroy_process_group()
        library._destroy()  # type: ignore[no-untyped-call]


ISSUED: list[list[IssuedOperation]] = []
"""The operations performed in each fake world that this process is in, the innermost last."""


class _Kernels:
    """Kernels that PyTorch's communication layer calls in place of a backend."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.issued: list[IssuedOperation] = []
        self._kept: set[Work] = set()
        self._sent: set[Work] = set()

    def by_name(self) -> dict[str, Callable[..., object]]:
        return {
            "allreduce_": self._all_reduce,
            "allreduce_coalesced_": self._all_reduce_coalesced,
            "reduce_": self._reduce,
            "broadcast_": self._broadcast,
            "_allgather_base_": self._all_gather_base,
            "allgather_": self._all_gather,
            "allgather_coalesced_": self._all_gather_coalesced,
            "allgather_into_tensor_coalesced_": self._all_gather_into_tensors,
            "_reduce_scatter_base_": self._reduce_scatter_base,
            "reduce_scatter_": self._reduce_scatter,
            "reduce_scatter_tensor_coalesced_": self._reduce_scatter_tensors,
            "gather_": self._gather,
            "scatter_": self._scatter,
            "alltoall_": self._all_to_all,
            "alltoall_base_": self._all_to_all_base,
            "send": self._send,
            "recv_": self._receive,
            "recv_any_source_": self._receive,
            "barrier": self._barrier,
        }

    def _all_reduce(self, tensors: list[Tensor], group: torch.ScriptObject, *_: object) -> object:
        self._note("all_reduce", group, tensors)
        return tensors, self._reduced(tensors)

    def _reduced(self, tensors: list[Tensor]) -> object:
        work = _Reduced(tensors)
        self._kept.add(work)
        return work.boxed()

    def _all_reduce_coalesced(self, tensors: list[Tensor], group: torch.ScriptObject, *_: object) -> object:
        self._note("all_reduce", group, tensors)
        if self.copies is Copies.GLOO:
            _flat(tensors)
        return FakeWork().boxed()

    def _reduce(self, tensors: list[Tensor], group: torch.ScriptObject, *_: object) -> object:
        self._note("reduce", group, tensors)
        return FakeWork().boxed()

    def _broadcast(self, tensors: list[Tensor], group: torch.ScriptObject, *_: object) -> object:
        self._note("broadcast", group, tensors)
        return tensors, FakeWork().boxed()

    def _all_gather_base(self, output: Tensor, given: Tensor, group: torch.ScriptObject, *_: object) -> object:
        self._note("all_gather", group, [output])
        if self.copies is Copies.GLOO:
            _flat([output])
        _repeat(output, given, group)
        return output, FakeWork().boxed()

    def _all_gather(
        self, outputs: list[list[Tensor]], given: list[Tensor], group: torch.ScriptObject, *_: object
    ) -> object:
        self._note("all_gather", group, [part for parts in outputs for part in parts])
        for parts, tensor in zip(outputs, given, strict=True):
            _flat(parts)
            for part in parts:
                _copy(part, tensor)
        return outputs, FakeWork().boxed()

    def _all_gather_coalesced(
        self, outputs: list[list[Tensor]], given: list[Tensor], group: torch.ScriptObject, *_: object
    ) -> object:
        self._note("all_gather", group, [part for parts in outputs for part in parts])
        for parts in outputs:
            _flat(parts)
            for part, tensor in zip(parts, given, strict=True):
                _copy(part, tensor)
        return FakeWork().boxed()

    def _all_gather_into_tensors(
        self, outputs: list[Tensor], given: list[Tensor], group: torch.ScriptObject, *_: object
    ) -> object:
        self._note("all_gather", group, outputs)
        if self.copies is Copies.GLOO:
            _flat(outputs)
        for output, tensor in zip(outputs, given, strict=True):
            _repeat(output, tensor, group)
        return FakeWork().boxed()

    def _reduce_scatter_base(
        self, output: Tensor, given: Tensor, group: torch.ScriptObject, op: object, is_async: bool = True, *_: object
    ) -> object:
        self._note("reduce_scatter", group, [given])
        copy = _flat([given]) if self.copies is Copies.GLOO else None
        _reduce_part(output, given, group)
        return output, self._holding([copy] if copy is not None and is_async else [])

    def _reduce_scatter(
        self, outputs: list[Tensor], given: list[list[Tensor]], group: torch.ScriptObject, *_: object
    ) -> object:
        self._note("reduce_scatter", group, [part for parts in given for part in parts])
        for output, parts in zip(outputs, given, strict=True):
            _flat(parts)
            _copy(output, parts[_place(group)])
        return outputs, FakeWork().boxed()

    def _reduce_scatter_tensors(
        self,
        outputs: list[Tensor],
        given: list[Tensor],
        group: torch.ScriptObject,
        op: object,
        is_async: bool = True,
        *_: object,
    ) -> object:
        self._note("reduce_scatter", group, given)
        copy = _flat(given) if self.copies is Copies.GLOO else None
        for output, tensor in zip(outputs, given, strict=True):
            _reduce_part(output, tensor, group)
        return self._holding([copy] if copy is not None and is_async else [])

    def _holding(self, tensors: Sequence[Tensor]) -> object:
        if not tensors:
            return FakeWork().boxed()
        return _Holding(tensors, self._kept).boxed()

    def _gather(
        self, outputs: list[list[Tensor]], given: list[Tensor], group: torch.ScriptObject, *_: object
    ) -> object:
        self._note("gather", group, given, parts=_size(group))
        for parts, tensor in zip(outputs, given, strict=False):
            if self.copies is Copies.GLOO:
                _flat(parts)
            for part in parts:
                _copy(part, tensor)
        return FakeWork().boxed()

    def _scatter(
        self, outputs: list[Tensor], given: list[list[Tensor]], group: torch.ScriptObject, *_: object
    ) -> object:
        self._note("scatter", group, outputs, parts=_size(group))
        for output, parts in zip(outputs, given, strict=False):
            _copy(output, parts[_place(group)])
        return outputs, FakeWork().boxed()

    def _all_to_all(self, outputs: list[Tensor], given: list[Tensor], group: torch.ScriptObject, *_: object) -> object:
        self._note("all_to_all", group, outputs)
        own = given[_place(group)]
        for output in outputs:
            _copy(output, own) if output.shape == own.shape else output.detach().zero_()
        return outputs, FakeWork().boxed()

    def _all_to_all_base(
        self,
        output: Tensor,
        given: Tensor,
        group: torch.ScriptObject,
        out_sizes: list[int],
        in_sizes: list[int],
        *_: object,
    ) -> object:
        self._note("all_to_all", group, [output])
        if not out_sizes and not in_sizes:
            own = given.detach().chunk(_size(group))[_place(group)]
            for part in output.detach().chunk(_size(group)):
                _copy(part, own)
        else:
            output.data.zero_()
        return FakeWork().boxed()

    def _send(self, tensors: list[Tensor], *_: object) -> object:
        """Send, and keep the message until the next call.

        A message lives as long as its sender keeps the work, which not all senders wait for. By the next call the
        sender has it.
        """
        self._sent.clear()
        return _Holding([tensor.data for tensor in tensors], self._sent).boxed()

    def _receive(self, tensors: list[Tensor], *_: object) -> object:
        self._sent.clear()
        for tensor in tensors:
            tensor.data.zero_()
        return FakeWork().boxed()

    def _barrier(self, tensor: Tensor, group: torch.ScriptObject, *_: object) -> object:
        self._note("barrier", group, [])
        return FakeWork().boxed()

    def _note(self, kind: str, group: torch.ScriptObject, tensors: Sequence[Tensor], parts: int = 1) -> None:
        self._sent.clear()
        self.issued.append(
            IssuedOperation(
                kind=kind,
                time_ns=time.time_ns(),
                ranks=tuple(sorted(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))),
                num_bytes=sum(tensor.nbytes for tensor in tensors) * parts,
            )
        )


def _size(group: torch.ScriptObject) -> int:
    return dist.ProcessGroup.unbox(group).size()


def _place(group: torch.ScriptObject) -> int:
    return dist.ProcessGroup.unbox(group).rank()


def _flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """Allocate one tensor as large as all of these, as a backend does while a collective runs."""
    if not tensors:
        return None
    return torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)


def _reduce_part(output: Tensor, given: Tensor, group: torch.ScriptObject) -> None:
    """Copy this rank's own part of `given` to `output`."""
    own = given.detach().reshape(-1)[_place(group) * output.numel() :][: output.numel()]
    _copy(output, own.view_as(output))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy through `data`, because a backend writes memory without autograd."""
    target.data.copy_(source.data)


def _repeat(output: Tensor, given: Tensor, group: torch.ScriptObject) -> None:
    """Copy `given` to every place of `output`. It may be a view of its own place."""
    rows, row, place = output.data.view(_size(group), -1), given.data.reshape(1, -1), _place(group)
    for others in (rows[:place], rows[place + 1 :]):
        others.copy_(row.expand_as(others))
    if rows[place].data_ptr() != row.data_ptr():
        rows[place].copy_(row[0])
