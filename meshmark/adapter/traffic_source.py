"""Where a rank's traffic is read from, for what does not go through `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One call of a communication library on one rank."""

    kind: str
    """As `meshmark.theory.traffic` has it: all_reduce, all_gather, reduce_scatter, broadcast, send, ..."""
    ranks: tuple[int, ...]
    """Of the group, in order; both ends of a send or a receive."""
    num_bytes: int
    """Of the full tensor: what an all-gather yields, what a reduce-scatter takes."""


class TrafficSource(Protocol):
    """Tells what a communication library did in a stretch of time, from the library's own log: not from the algorithm
    that is to be judged by it."""

    def start(self) -> None:
        """What follows counts, until `stop`: a step is several such stretches."""

    def stop(self) -> None:
        """What follows does not count."""

    def asked(self) -> Sequence[Transfer]:
        """What the framework called for within all stretches, once they are over."""

    def issued(self) -> Sequence[Transfer]:
        """What the library did for it."""
