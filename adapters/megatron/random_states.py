"""Random states that megatron-core keeps, by group of parallel ranks."""

from __future__ import annotations

from meshmark.theory.backward_pass import RNG_STATE_BYTES
from meshmark.theory.memory import ExtraMemory


def random_states() -> ExtraMemory:
    """Those of data-, tensor- and expert-parallel ranks. They are tensors of the host, whatever the device."""
    reason = "on a CPU, the random states of data-, tensor- and expert-parallel ranks, which are tensors there"
    return ExtraMemory(category="steady", num_bytes=3 * RNG_STATE_BYTES, reason=reason, on_host=True)
