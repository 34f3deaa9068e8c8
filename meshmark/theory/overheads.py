"""What an allocator and a framework take beyond the tensors of a closed form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Memory that no tensor of the step accounts for; by default none, as exact bytes of tensors are measured."""

    fragmentation: float = 0.0
    """Reserved but unused memory, over activations and working set."""
    queued_collectives: float = 0.0
    """Whole-sequence tensors that queued collectives pin when the host is far ahead, all in forward passes."""
    overhead_bytes: float = 0.0
    """What the framework takes before a model is there."""
