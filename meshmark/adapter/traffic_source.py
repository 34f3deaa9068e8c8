"""Where a rank's traffic is read from, for what does not go through `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A call of a communication library on one rank."""

    kind: str
    """As `meshmark.theory.traffic` has it: all_reduce, all_gather, reduce_scatter, broadcast, send, ..."""
    ranks: tuple[int, ...]
    """Ranks of the group, in order; for a send or a receive, both ends."""
    num_bytes: int
    """Bytes of the full tensor: the output of an all-gather, the input of a reduce-scatter."""


class TrafficSource(Protocol):
    """Tells what a communication library did in a stretch of time, from the library's own log: not from the algorithm
    that is to be judged by it."""

    def start(self) -> None:
        """Start counting, until `stop`. A step has several such intervals."""

    def stop(self) -> None:
        """Stop counting."""

    def requested(self) -> Sequence[Transfer]:
        """Return the transfers that the framework called for in all intervals. Call it after they are over."""

    def issued(self) -> Sequence[Transfer]:
        """Return the transfers that the library issued for them."""
