"""What links between nodes carry, and which node or link is the odd one out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshmark.spec.hardware import GIGA

_Key = TypeVar("_Key")
FEWEST_NODES = 3
"""Of two, nobody can say which is the odd one."""
_FALSE_ALARM = 1e-3
"""Chance that one of all that are compared is called odd where none is."""
_MATTERS = 0.8
"""Of the usual rate: what is no slower than this is not worth a technician's way."""
_SCATTER = 0.02
"""Relative: no median of a handful of transfers is known better."""
_OF_MAD = 1.4826
"""Standard deviations of a normal distribution to its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """From one node to another, as its sender timed it."""

    source: int
    target: int
    go: int
    """All pairs are measured twice, one after the other: what is odd by chance is seldom odd again."""
    num_bytes: int
    """Of a transfer."""
    seconds: list[float]
    """Of each transfer, until the receiver's word that it has all was back."""

    @property
    def rate(self) -> float:
        """Bytes a second, of the median transfer: the best says nothing of a link that fails from time to time."""
        return self.num_bytes / statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Odd:
    """A node, or a link, that is slower than its like."""

    who: str
    rate: float
    usual: float

    def __str__(self) -> str:
        return (
            f"{self.who}: {self.rate / GIGA:.3g} GB/s, where {self.usual / GIGA:.3g} is usual "
            f"({self.usual / self.rate:.1f} times slower)"
        )


def odd_ones(links: Sequence[Link]) -> list[Odd]:
    """Those of the last go that every other had too."""
    goes = [_odd_ones([link for link in links if link.go == go]) for go in sorted({link.go for link in links})]
    return [one for one in goes[-1] if all(one.who in {other.who for other in go} for go in goes)]


def _odd_ones(links: Sequence[Link]) -> list[Odd]:
    """Nodes first; then links whose nodes are both well. A node sends badly when even its best link does; receiving is
    held against receiving alike."""
    nodes = {link.source for link in links} | {link.target for link in links}
    if len(nodes) < FEWEST_NODES:
        return []
    scatter = _scatter(links)
    sends = _slow(_best(links, lambda link: link.source), scatter)
    takes = _slow(_best(links, lambda link: link.target), scatter)
    well = {
        (link.source, link.target): link.rate for link in links if link.source not in sends and link.target not in takes
    }
    found = [_told(f"node {node} sends slowly, to any other", one) for node, one in sends.items()]
    found += [_told(f"node {node} receives slowly, from any other", one) for node, one in takes.items()]
    found += [_told(f"from node {a} to node {b}", one) for (a, b), one in _slow(well, scatter).items()]
    return found


def _told(who: str, rates: tuple[float, float]) -> Odd:
    return Odd(who=who, rate=rates[0], usual=rates[1])


def _best(links: Sequence[Link], node: Callable[[Link], int]) -> dict[int, float]:
    best = dict[int, float]()
    for link in links:
        best[node(link)] = max(link.rate, best.get(node(link), 0.0))
    return best


def _slow(rates: Mapping[_Key, float], scatter: float) -> dict[_Key, tuple[float, float]]:
    """Those that are far below the median, in standard deviations that a few odd ones do not move, and by an amount
    that matters: rate and median."""
    if len(rates) < FEWEST_NODES:
        return {}
    usual = statistics.median(rates.values())
    distances = {key: math.log(usual / rate) for key, rate in rates.items()}
    deviation = max(_OF_MAD * statistics.median(map(abs, distances.values())), scatter)
    far = statistics.NormalDist().inv_cdf(1 - _FALSE_ALARM / len(rates)) * deviation
    return {key: (rates[key], usual) for key, d in distances.items() if d > far and rates[key] < _MATTERS * usual}


def _scatter(links: Sequence[Link]) -> float:
    """Of a rate, relative, as its own transfers show it: of most links, whatever a few do."""
    own = []
    for link in links:
        middle = statistics.median(link.seconds)
        own.append(
            _OF_MAD * statistics.median(abs(s / middle - 1) for s in link.seconds) / math.sqrt(len(link.seconds))
        )
    return max(statistics.median(own), _SCATTER)


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair of nodes once, in as few rounds as there can be: a node is in one pair of a round at most."""
    seats = [*range(nodes), *([-1] if nodes % 2 else [])]
    half, played = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        played.append([(a, b) for a, b in pairs if min(a, b) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return played
