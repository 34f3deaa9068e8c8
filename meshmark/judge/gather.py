"""Gather values of every rank without pickle: JSON and plain arrays, with checked sizes.

PyTorch's object collectives unpickle what peers send, and unpickling runs any code that the sender names.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

MOST_BYTES = 2**36
"""Upper bound for one rank's data, above what any model that is compared with the truth needs."""
_ALIGNMENT = 8
_KINDS = "fiu"
"""Kinds of NumPy dtypes that are plain numbers."""


def all_gather_json(value: object) -> list[Any]:
    """Return every rank's `value`, by rank. A collective call."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device_of_default_group())
    sizes = _all_sizes(len(own))
    padded = _padded(own, max(sizes))
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [
        json.loads(text[:size].cpu().numpy().tobytes().decode()) for text, size in zip(everyone, sizes, strict=True)
    ]


def gather_arrays(arrays: list[NDArray[Any]]) -> list[list[NDArray[Any]]] | None:
    """Return every rank's `arrays` on rank 0, by rank, and None elsewhere. A collective call."""
    own = np.zeros(sum(_room(array) for array in arrays), dtype=np.uint8)
    offset = 0
    for array in arrays:
        own[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += _room(array)
    forms = all_gather_json([[array.dtype.str, list(array.shape)] for array in arrays])
    sizes = _all_sizes(len(own))
    padded = _padded(torch.from_numpy(own).to(device_of_default_group()), max(sizes))
    everyone = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, everyone)
    if everyone is None:
        return None
    return [
        _unpacked(form, payload[:size].cpu().numpy())
        for form, payload, size in zip(forms, everyone, sizes, strict=True)
    ]


def _unpacked(forms: list[tuple[str, list[int]]], payload: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Return copies of the arrays in `payload`. Raises `ValueError` unless they fill it."""
    arrays, offset = [], 0
    for name, shape in forms:
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS or any(dim < 0 for dim in shape):
            raise ValueError(f"a rank sent an array of {name!r} and shape {shape}: expected plain numbers")
        num_bytes = math.prod(shape) * dtype.itemsize
        array = payload[offset : offset + num_bytes].view(dtype).reshape(shape).copy()
        arrays.append(array)
        offset += _room(array)
    if offset != len(payload):
        raise ValueError(f"a rank sent {len(payload)} bytes where its arrays take {offset}")
    return arrays


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _all_sizes(own: int) -> list[int]:
    """Return every rank's number of bytes. Raises `ValueError` for sizes that no trace can have."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=device_of_default_group()) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own], dtype=torch.int64, device=device_of_default_group()))
    told = [int(size) for size in sizes]
    if not all(0 <= size <= MOST_BYTES for size in told):
        raise ValueError(f"the ranks want to send {told} bytes: expected 0 to {MOST_BYTES} each")
    return told


def _padded(own: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(own, (0, size - len(own)))


def device_of_default_group() -> torch.device:
    """Return the device on which the default process group takes its tensors."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
