"""GPUs of this machine, counted without touching CUDA: the process that forks must not."""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def num_gpus() -> int:
    """CUDA devices that PyTorch will see."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
