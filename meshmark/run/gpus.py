"""GPUs of this machine, counted without touching CUDA: whoever asks may fork."""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_gpus() -> int:
    """CUDA devices that PyTorch will see."""
    return torch.cuda.device_count()  # asks NVML; `is_available` would ask the CUDA runtime
