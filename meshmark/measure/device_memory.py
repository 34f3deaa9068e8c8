"""Statistics of CUDA's caching allocator over the steps of a pass, and memory outside it.

They come from PyTorch's own counters, which cost nothing while steps run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # a record is read without it


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory statistics of one rank on a GPU."""

    allocated_peak_bytes: int
    """Peak bytes of tensors, rounded to blocks."""
    reserved_peak_bytes: int
    """Peak bytes that the allocator held of the device, including its caches."""
    fragmented_bytes: int
    """Bytes at the end in free parts of split blocks, which a larger tensor cannot use."""
    num_retries: int
    """Number of times that the allocator had to free its caches first to find room. Each stalls all streams."""
    outside_bytes: int
    """Bytes of the whole device at the end that are used outside this process's allocator.

    They are CUDA's context, NCCL's buffers and libraries' workspaces, and other processes if ranks share a GPU.
    """


def start_device_memory(device: torch.device) -> None:
    """Reset the peaks."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the statistics since `start_device_memory`, or None on the CPU."""
    if device.type != "cuda":
        return None
    import torch

    return device_memory(torch.cuda.memory_stats(device), torch.cuda.mem_get_info(device))


def device_memory(statistics: Mapping[str, int], free_and_total: tuple[int, int]) -> DeviceMemory:
    """Return the statistics from the values of `torch.cuda.memory_stats` and `mem_get_info`."""
    free, total = free_and_total
    return DeviceMemory(
        allocated_peak_bytes=statistics["allocated_bytes.all.peak"],
        reserved_peak_bytes=statistics["reserved_bytes.all.peak"],
        fragmented_bytes=statistics["inactive_split_bytes.all.current"],
        num_retries=statistics["num_alloc_retries"],
        outside_bytes=total - free - statistics["reserved_bytes.all.current"],
    )
