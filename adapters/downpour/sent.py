"""Bytes that a replica sends and receives by RPC, counted where its calls are pickled.

The recorders of torch.distributed do not observe RPC. Tensors travel beside the pickle, each in full. Names and
numbers, a few hundred bytes in each call, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.rpc import internal

from meshmark.adapter.engine import Transfer


class PickledCalls:
    """Between `start` and `stop` this process calls by one thread, and answers to others: calls are pickled here, and
    their answers read; what it answers to others is the other way round."""

    def __init__(self, rank: int, server: int) -> None:
        self.ranks = tuple(sorted({rank, server}))
        self.found: list[Transfer] = []

    def start(self) -> None:
        pickler, found = internal._internal_rpc_pickler, self.found

        def serialize(obj: Any) -> Any:  # noqa: ANN401
            pickled, tensors = type(pickler).serialize(pickler, obj)  # type: ignore[no-untyped-call]
            if isinstance(obj, internal.PythonUDF) and (num_bytes := _bytes(tensors)):
                found.append(Transfer(kind="send", ranks=self.ranks, num_bytes=num_bytes))
            return pickled, tensors

        def deserialize(pickled: bytes, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
            num_bytes = _bytes(tensors)
            obj = type(pickler).deserialize(pickler, pickled, tensors)  # type: ignore[no-untyped-call]
            if not isinstance(obj, internal.PythonUDF) and num_bytes:
                found.append(Transfer(kind="recv", ranks=self.ranks, num_bytes=num_bytes))
            return obj

        vars(pickler).update(serialize=serialize, deserialize=deserialize)

    def stop(self) -> None:
        for name in ("serialize", "deserialize"):
            del vars(internal._internal_rpc_pickler)[name]

    def requested(self) -> list[Transfer]:
        return self.found

    def issued(self) -> list[Transfer]:
        return self.found


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
