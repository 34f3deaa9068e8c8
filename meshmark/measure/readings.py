"""Readings of the meters, as values without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# --- Readings of the meters, as values without torch.


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """A number of bytes by category."""

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    communication: int = 0
    """Buffers of collectives that are in no category above."""
    activations: int = 0
    """Everything else that a step allocates: saved tensors, temporaries, gathered parameters."""
    other: int = 0
    """Storages that exist outside the step and have no name."""
    inputs: int = 0
    """The global batch, which the engine receives."""
    workspaces: int = 0
    """CUDA: workspaces that PyTorch keeps for cuBLAS, per stream and thread, from its first product on."""

    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer_states
            + self.communication
            + self.activations
            + self.other
            + self.inputs
            + self.workspaces
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """One rank's memory during one step after warm-up."""

    steady: Bytes
    """Between two steps. Its total is the allocator's own count."""
    states: Bytes
    """Model states at their fullest: gradients between backward and update, the rest after the update.

    Only the first four categories are filled.
    """
    peak: Bytes
    """When the allocator counts most bytes in backward pass or update.

    Only tensors count, without memory that a kernel allocates and frees itself.
    """
    workspace_bytes: int = 0
    """How much the allocator's highest count exceeds `peak`: workspaces of kernels."""
    held: Bytes | None = None
    """When the step's first backward pass begins: what forward passes keep for it, without gradients.

    None when no backward pass was seen.
    """
    late_bytes: int = 0
    """Part of the peak in collectives' buffers that only a backend's thread still holds, or may hold."""
    previous_steady_bytes: int | None = None
    """Total of `steady` after the previous step."""
    rounding_bytes: int = 0
    """How much the allocator's blocks exceed the named storages in the steady state. Zero on the CPU."""
    allocator_peak_bytes: int | None = None
    """CUDA: `max_memory_allocated` of the step."""
    allocator_reserved_bytes: int | None = None
    """CUDA: `max_memory_reserved` of the step."""
    ends_known: bool = True
    """True if the end of every storage's lifetime is known.

    Otherwise `peak` has the allocator's total, but its categories, `late_bytes` and `held` are unknown.
    """

    @property
    def counted_peak_bytes(self) -> int:
        """Peak by the meters, including workspaces of kernels."""
        return self.peak.total + self.workspace_bytes

    @property
    def disagreement(self) -> float:
        """Relative difference between the meters' peak and the allocator's. 0 if the allocator reports none."""
        told = self.allocator_peak_bytes
        return abs(self.counted_peak_bytes - told) / told if told else 0.0


def wire_factor(kind: str, group_size: int) -> float:
    """Return the bytes that each rank sends per byte of a collective's full tensor, under ring algorithms.

    See Thakur et al. 2005, and nccl-tests' bus bandwidth. A receive counts as its sender's traffic. NaN for an unknown
    kind, because a backend may issue any kind.
    """
    n = group_size
    return {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "broadcast": (n - 1) / n,
        "reduce": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "gather": (n - 1) / n,
        "scatter": (n - 1) / n,
        "send": 1.0,
        "recv": 0.0,
        "barrier": 0.0,
    }.get(kind, math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All calls of one kind over one group of ranks within one step."""

    kind: str
    group_size: int
    ranks: tuple[int, ...] = ()
    """Ranks of the group, in order; or both ends of a send or a receive. Old records only have the size."""
    count: int
    num_bytes: int
    """Bytes of the full tensors: the output of an all-gather, the input of a reduce-scatter."""

    @property
    def wire_bytes(self) -> float:
        return self.num_bytes * wire_factor(self.kind, self.group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficReading:
    """One rank's communication in one step after warm-up."""

    asked: list[Collective]
    """Operations that the framework called, independent of the backend."""
    issued: list[Collective]
    """Operations that the backend performed. Gloo, for example, has no reduce-scatter and issues an all-reduce."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlikeSteps:
    """Steps in which one rank's backend performed the same operations, by kind and group."""

    steps: list[int]
    issued: list[Collective]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReadings:
    """Memory that one rank held after each step, and what its backend did in each."""

    live_bytes: dict[int, int]
    """By step: the allocator's count after it, of everything that this process holds."""
    sent: list[AlikeSteps]
    """Ordered by the first of their steps. Empty if unknown."""
    failure: str = ""
    """Why it is unknown what was sent."""


# --- Statistics of CUDA's caching allocator over the steps of a pass, and memory outside it.


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
