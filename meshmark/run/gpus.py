"""GPUs of this machine, counted without touching CUDA: whoever asks may fork."""

from __future__ import annotations

import functools

import torch

from meshmark.pluralize import pluralize


@functools.cache
def num_gpus() -> int:
    """CUDA devices that PyTorch will see."""
    return torch.cuda.device_count()  # asks NVML; `is_available` would ask the CUDA runtime


def refuses_to_share(ranks: int, gpus: int) -> str | None:
    """Why NCCL cannot serve so many ranks of a node with so many GPUs; None when it can."""
    if ranks <= gpus:
        return None
    have = pluralize(gpus, "GPU") if gpus else "no GPU"
    return f"{pluralize(ranks, 'rank')} of a node with {have} over nccl, which takes a GPU of its own for each rank"
