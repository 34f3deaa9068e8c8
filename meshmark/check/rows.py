"""Tell the rows of data that enter a model, to find those that ranks or steps share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from meshmark.check.recording import Call
from meshmark.check.tree import tensors_in


def rows_of(calls: Sequence[Call]) -> Counter[bytes]:
    """Return how often each row entered the model, by its digest. Where few rows exist, batches share most of them."""
    found = Counter[bytes]()
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
            found[digest.digest()] += 1
    return found


def _bytes(row: Tensor) -> bytes:
    return (
        bytes(row.contiguous().reshape(-1).view(torch.uint8).numpy().data) if row.dim() else repr(row.item()).encode()
    )
