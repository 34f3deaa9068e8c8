"""The allocators' own counts: of all bytes that they gave out and were not given back, whichever thread did it."""

from __future__ import annotations

import ctypes
import functools
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshmark.errors import MeshmarkError

_ATTEMPTS = 5
"""At a profile that sees an allocation."""
_SETTLE_SECONDS = 0.02
"""Gloo's threads let go of a tensor microseconds after they have said that its collective is done, if they are let."""


@functools.cache
def count_all_threads() -> None:
    """From here on PyTorch's CPU allocator counts what any thread allocates and frees. By itself it counts what threads
    under a profiler do, so that what another one frees stays counted for ever. There is no way to say so from Python
    but the variable itself."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def settle(device: torch.device) -> int:
    """Wait until what a step has done is over, and have the allocator tell its count; returns when. What PyTorch keeps
    for cuBLAS in the same allocator is no tensor of the step's, and is made again when it is needed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
    else:
        time.sleep(_SETTLE_SECONDS)
    told = torch.empty(1, device=device)
    del told  # the end of it is the last change before this time
    return time.time_ns()


def cublas_workspace_bytes(config: str) -> int:
    """Return how much PyTorch allocates for cuBLAS by stream and thread, under a CUBLAS_WORKSPACE_CONFIG such as
    ":4096:8": pairs of KiB and of how many of that size. 0 where it is not set, or not understood."""
    numbers = [int(part) for part in config.strip().lstrip(":").split(":") if part.isdigit()]
    if not numbers or len(numbers) % 2:
        return 0
    return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))


def allocated_bytes(device: torch.device) -> int:
    """Return the allocator's own count; no profiler may be running.

    On a CPU the allocator tells it to a profiler alone, and `count_all_threads` must have been called before the first
    allocation that is to count. On a machine with five times as many runnable processes as cores, a profile was once
    empty; another is taken then.

    Raises `MeshmarkError` if the profiler sees nothing at all.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    for _ in range(_ATTEMPTS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as short:
            told = torch.empty(1)
            del told
        results: Any = short.profiler.kineto_results
        stack, changes = list(results.experimental_event_tree()), []
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            changes += [event] if event.name == "[memory]" else []
        if changes:
            return int(max(changes, key=lambda event: event.start_time_ns).extra_fields.total_allocated)
    raise MeshmarkError(f"PyTorch's profiler saw no allocation in {_ATTEMPTS} attempts: memory cannot be counted")


class CudaPeaks:
    """Most bytes allocated and reserved within windows alone; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.allocated, self.reserved = device, 0, 0

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of tensors that were gathered to be compared are not the step's
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> None:
        if self._device.type == "cuda":
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(self._device))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self._device))
