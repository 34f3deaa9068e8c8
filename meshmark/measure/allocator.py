"""The allocators' own counts of bytes that are allocated and not freed, by any thread."""

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
"""Largest number of attempts to take a profile that sees an allocation."""
_SETTLE_SECONDS = 0.02
"""Time for gloo's threads to release tensors, which takes them microseconds after a collective is reported done."""


@functools.cache
def count_all_threads() -> None:
    """Make PyTorch's CPU allocator count what any thread allocates and frees.

    By default it counts only threads under a profiler, so that memory freed by another thread stays counted. The flag
    can only be set through the C++ variable.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def settle(device: torch.device) -> int:
    """Wait until the work of a step is over, and make the allocator report its count. Returns the time.

    Clears cuBLAS's workspaces in the same allocator, which are not tensors of the step, and are allocated again on
    demand.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
    # NCCL releases tensors in the thread that calls it next: there is nothing to wait for.
    if not (torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"):
        time.sleep(_SETTLE_SECONDS)
    told = torch.empty(1, device=device)
    del told  # the end of it is the last change before this time
    return time.time_ns()


def cublas_workspace_bytes(config: str) -> int:
    """Return how much PyTorch allocates for cuBLAS per stream and thread.

    `config` is a CUBLAS_WORKSPACE_CONFIG such as ":4096:8": pairs of a size in KiB and a count. Returns 0 if it is not
    set or not understood.
    """
    numbers = [int(part) for part in config.strip().lstrip(":").split(":") if part.isdigit()]
    if not numbers or len(numbers) % 2:
        return 0
    return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))


def allocated_bytes(device: torch.device) -> int:
    """Return the allocator's own count. No profiler may be running.

    On a CPU the allocator reports it only to a profiler, and `count_all_threads` must have been called before the
    first allocation that should count. On a machine with five times as many runnable processes as cores, a profile was
    once empty; in that case another is taken.

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
    """Peak bytes allocated and reserved within windows. Does nothing on the CPU."""

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
