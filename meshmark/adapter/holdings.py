"""The tensors that a rank holds, by category."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The tensors that a rank holds right now, by category. Meters count their storages, each once.

    An engine only *names* storages here: the meter's totals come from the allocator, and what is alive without being
    named shows as `other`.
    """

    parameters: list[Tensor] = field(default_factory=list)
    """Local parameters or shards, in every precision that is kept (bf16 weights and fp32 masters both)."""
    gradients: list[Tensor] = field(default_factory=list)
    optimizer_states: list[Tensor] = field(default_factory=list)
    """Moments; master weights are parameters."""
    communication: list[Tensor] = field(default_factory=list)
    """Buffers that live between steps for the sake of communication, such as gradient buckets."""


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and size of every distinct storage behind `tensors`, empty ones left out."""
    storages = (t.untyped_storage() for t in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}
