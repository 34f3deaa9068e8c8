"""Find which rows of data are shared between ranks or steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from meshmark.check.recording import Call
from meshmark.check.tree import tensors_in


def rows_of(calls: Sequence[Call]) -> set[bytes]:
    """Return digests of the rows that entered the model."""
    found = set()
    for call in calls:
        tensors = [t for t in tensors_in(call.inputs) if t.dim()]
        if not tensors:
            continue
        num = tensors[0].shape[0]
        batched = [t for t in tensors if t.shape[0] == num]
        for row in range(num):
            digest = hashlib.sha256()
            for tensor in batched:
                digest.update(_bytes(tensor[row]))
            found.add(digest.digest())
    return found


def _bytes(row: Tensor) -> bytes:
    return (
        bytes(row.contiguous().reshape(-1).view(torch.uint8).numpy().data) if row.dim() else repr(row.item()).encode()
    )


def shared_rows(ranks: Sequence[Sequence[Call]]) -> bool:
    """Return whether all ranks read exactly the same rows."""
    first, *others = (rows_of(calls) for calls in ranks)
    return bool(first) and all(own == first for own in others)


def repeated_rows(before: Sequence[Call], now: Sequence[Call]) -> bool:
    """Return whether two steps read exactly the same rows."""
    return rows_of(before) == rows_of(now)
