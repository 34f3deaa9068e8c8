"""Memory of an allocator and a framework beyond the tensors of a closed form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Memory that no tensor of the step accounts for.

    Zero by default, because tests measure exact bytes of tensors.
    """

    fragmentation: float = 0.0
    """Reserved but unused memory, as a share of activations and working set."""
    queued_collectives: float = 0.0
    """Whole-sequence tensors that queued collectives pin when the host is far ahead, all in forward passes."""
    overhead_bytes: float = 0.0
    """Memory that the framework takes before a model is built."""
