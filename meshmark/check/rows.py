"""Tell the rows of data that enter a model, to find those that ranks or steps share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from meshmark.check.recording import Call
from meshmark.check.tree import tensors_in, with_tensors


def rows_of(steps: Sequence[Sequence[Call]]) -> list[Counter[bytes]]:
    """Return how often each row entered the model, by its digest, for the calls of each rank in one step.

    Where few rows exist, batches share most of them. Tensors of one length are taken for parts of the same rows. Of
    several lengths, those that are the same on all ranks, such as a mask or positions, are no data if others differ.
    """
    found = [_by_length(calls) for calls in steps]
    lengths = list(dict.fromkeys(length for own in found for length in own))
    differ = [n for n in lengths if any(own.get(n) != found[0].get(n) for own in found)]
    return [sum((own.get(n, Counter()) for n in differ or lengths), Counter[bytes]()) for own in found]


def _by_length(calls: Sequence[Call]) -> dict[int, Counter[bytes]]:
    """Return the digests of rows by the number, among a call's inputs, of the first tensor of their length."""
    found: dict[int, Counter[bytes]] = {}
    for call in calls:
        groups: dict[int, list[Tensor]] = {}
        for tensor in tensors_in(call.inputs):
            if tensor.dim():
                groups.setdefault(tensor.shape[0], []).append(tensor)
        for number, (length, tensors) in enumerate(groups.items()):
            rows = found.setdefault(number, Counter[bytes]())
            for row in range(length):
                digest = hashlib.sha256()
                for tensor in tensors:
                    digest.update(_bytes(tensor[row]))
                rows[digest.digest()] += 1
    return found


def num_repeated(calls: Sequence[Call]) -> int:
    """Return how many calls that train have the inputs and targets of an earlier one among them.

    Calls whose targets are not known do not count, because a gradient penalty calls the model on the same rows again.
    Neither do calls for which the script has changed weights, as sharpness-aware minimisation does.
    """
    seen: Counter[tuple[object, ...]] = Counter()
    for call in calls:
        targets = tuple(term.targets for term in call.terms if term.targets)
        if targets and call.used_gradients and not call.weights:
            digest = hashlib.sha256(repr(with_tensors(call.inputs, lambda x: x.flatten()[:0])).encode())
            for tensor in tensors_in(call.inputs):
                digest.update(_bytes(tensor))
            seen[call.root, digest.digest(), targets] += 1
    return seen.total() - len(seen)


def unordered_digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's values that does not depend on their order."""
    values = tensor.detach().cpu().reshape(-1)
    return hashlib.sha256(_bytes(values.double().sort().values)).digest()


def _bytes(row: Tensor) -> bytes:
    return (
        bytes(row.contiguous().reshape(-1).view(torch.uint8).numpy().data) if row.dim() else repr(row.item()).encode()
    )
