"""What CUDA's caching allocator came to over the steps of a pass, and what lies outside it: from PyTorch's own
statistics, which cost nothing while steps run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # a record is read without it


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """One rank's, on a GPU."""

    allocated_peak_bytes: int
    """Of tensors, rounded to blocks."""
    reserved_peak_bytes: int
    """That the allocator held of the device, its caches among it."""
    fragmented_bytes: int
    """At the end: in blocks that are split, and free, and of no use to a larger tensor."""
    num_retries: int
    """Times that the allocator found no room, and gave its caches back first: each holds all streams up."""
    outside_bytes: int
    """At the end, of the whole device: used by anybody and not held by this process's allocator. CUDA's context, NCCL's
    buffers, libraries' workspaces; and other processes, where ranks share a GPU."""


def start_device_memory(device: torch.device) -> None:
    """From here on peaks count."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """Since `start_device_memory`; None on the CPU."""
    if device.type != "cuda":
        return None
    import torch

    return device_memory(torch.cuda.memory_stats(device), torch.cuda.mem_get_info(device))


def device_memory(statistics: Mapping[str, int], free_and_total: tuple[int, int]) -> DeviceMemory:
    """From what `torch.cuda.memory_stats` and `mem_get_info` say."""
    free, total = free_and_total
    return DeviceMemory(
        allocated_peak_bytes=statistics["allocated_bytes.all.peak"],
        reserved_peak_bytes=statistics["reserved_bytes.all.peak"],
        fragmented_bytes=statistics["inactive_split_bytes.all.current"],
        num_retries=statistics["num_alloc_retries"],
        outside_bytes=total - free - statistics["reserved_bytes.all.current"],
    )
