"""What the meters found: values, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """A number of bytes, split by what they are for."""

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    communication: int = 0
    """Buffers that collectives read or write and that are nothing above."""
    activations: int = 0
    """All else that a step allocates: saved tensors, temporaries, gathered parameters."""
    other: int = 0
    """Alive outside the step and named by nobody."""
    inputs: int = 0
    """The global batch, which the engine is handed."""
    workspaces: int = 0
    """CUDA: what PyTorch keeps for cuBLAS to work in, by stream and thread, from its first product on."""

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
    """Between two steps; its total is the allocator's own count."""
    states: Bytes
    """Model states as held at their fullest: gradients between backward and update, the rest after the update.
    Only the first four categories are filled."""
    peak: Bytes
    """At the instant of the step when the allocator counts most bytes, of backward pass and update alone, and of
    tensors: without what a kernel takes and gives back itself."""
    workspace_bytes: int = 0
    """By how much the most that the allocator counted is more than `peak`: what kernels took to work in then."""
    held: Bytes | None = None
    """When the step's first backward pass begins: what forward passes leave for it, and no gradient yet. None when no
    backward pass was seen."""
    late_bytes: int = 0
    """Of the peak, buffers of collectives that are there, or may be, for the sake of a backend's thread alone, which
    had not yet let go of them."""
    previous_steady_bytes: int | None = None
    """The total of `steady` after the step before."""
    rounding_bytes: int = 0
    """By how much the allocator's blocks are larger than the storages named, steady: none on the CPU."""
    allocator_peak_bytes: int | None = None
    """CUDA: `max_memory_allocated` of the step."""
    allocator_reserved_bytes: int | None = None
    """CUDA: `max_memory_reserved` of the step."""
    ends_known: bool = True
    """Whether it is known when every storage ended. Where not, `peak` has the allocator's total, but neither its
    categories nor `late_bytes` nor `held` is known."""

    @property
    def counted_peak_bytes(self) -> int:
        """By the meters, what kernels took to work in among it."""
        return self.peak.total + self.workspace_bytes

    @property
    def disagreement(self) -> float:
        """How far the meters' peak is from the allocator's own, relative to that; 0 where it tells none."""
        told = self.allocator_peak_bytes
        return abs(self.counted_peak_bytes - told) / told if told else 0.0


def wire_factor(kind: str, group_size: int) -> float:
    """Bytes that each rank sends for one byte of a collective's full tensor, under ring algorithms (Thakur et al. 2005,
    as nccl-tests' bus bandwidth has it). A receive is its sender's traffic. Not a number of a kind that is not known: a
    backend may issue what nobody here has heard of."""
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
    """Of the group, in order; both ends of a send or a receive. Records of old tell the size alone."""
    count: int
    num_bytes: int
    """Of the full tensors: what an all-gather yields, what a reduce-scatter takes."""

    @property
    def wire_bytes(self) -> float:
        return self.num_bytes * wire_factor(self.kind, self.group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficReading:
    """One rank's communication in one step after warm-up."""

    asked: list[Collective]
    """What the framework called for: the same on every backend."""
    issued: list[Collective]
    """What the backend did for it: gloo, for one, has no reduce-scatter and issues an all-reduce."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlikeSteps:
    """Steps in which one rank's backend did the same, by kind and group."""

    steps: list[int]
    issued: list[Collective]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReadings:
    """What one rank held after each step, and what its backend did in each."""

    live_bytes: dict[int, int]
    """By step: the allocator's own count after it, of everything that this process holds."""
    sent: list[AlikeSteps]
    """In order of the first of their steps. Empty where it cannot be told."""
    failure: str = ""
    """Why it cannot be told what was sent."""
