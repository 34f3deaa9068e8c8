"""Bandwidth of links between nodes, and detection of nodes or links that are outliers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshmark.spec.hardware import GIGA

_Key = TypeVar("_Key")
FEWEST_NODES = 3
"""Least number of nodes. With two, an outlier cannot be identified."""
_FALSE_ALARM = 1e-3
"""Probability that any of all compared values is called an outlier if there is none."""
_MATTERS = 0.8
"""Share of the usual rate. Anything that is not slower than this does not matter."""
_SCATTER = 0.02
"""Least relative scatter. The median of a few transfers is not known more precisely."""
_OF_MAD = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link from one node to another, timed by the sender."""

    source: int
    target: int
    go: int
    """Number of the round. All pairs are measured twice, because a random outlier seldom repeats."""
    num_bytes: int
    """Bytes per transfer."""
    seconds: list[float]
    """Seconds of each transfer, until the receiver's confirmation arrived."""

    @property
    def rate(self) -> float:
        """Bytes per second of the median transfer. The best transfer would hide a link that fails occasionally."""
        return self.num_bytes / statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Odd:
    """A node or link that is slower than its peers."""

    who: str
    rate: float
    usual: float

    def __str__(self) -> str:
        return (
            f"{self.who}: {self.rate / GIGA:.3g} GB/s, where {self.usual / GIGA:.3g} is usual "
            f"({self.usual / self.rate:.1f} times slower)"
        )


def odd_ones(links: Sequence[Link]) -> list[Odd]:
    """Return the outliers of the last round that were outliers in every round."""
    goes = [_odd_ones([link for link in links if link.go == go]) for go in sorted({link.go for link in links})]
    return [one for one in goes[-1] if all(one.who in {other.who for other in go} for go in goes)]


def _odd_ones(links: Sequence[Link]) -> list[Odd]:
    """Return nodes that are outliers, then links between good nodes.

    A node sends badly if even its best link is slow. Receiving is compared with receiving in the same way.
    """
    nodes = {link.source for link in links} | {link.target for link in links}
    if len(nodes) < FEWEST_NODES:
        return []
    scatter = _scatter(links)
    sends = _slow(_best(links, lambda link: link.source), scatter)
    takes = _slow(_best(links, lambda link: link.target), scatter)
    well = {
        (link.source, link.target): link.rate for link in links if link.source not in sends and link.target not in takes
    }
    found = [_slow_link(f"node {node} sends slowly, to any other", one) for node, one in sends.items()]
    found += [_slow_link(f"node {node} receives slowly, from any other", one) for node, one in takes.items()]
    found += [_slow_link(f"from node {a} to node {b}", one) for (a, b), one in _slow(well, scatter).items()]
    return found


def _slow_link(who: str, rates: tuple[float, float]) -> Odd:
    return Odd(who=who, rate=rates[0], usual=rates[1])


def _best(links: Sequence[Link], node: Callable[[Link], int]) -> dict[int, float]:
    best = dict[int, float]()
    for link in links:
        best[node(link)] = max(link.rate, best.get(node(link), 0.0))
    return best


def _slow(rates: Mapping[_Key, float], scatter: float) -> dict[_Key, tuple[float, float]]:
    """Return values far below the median, as (rate, median).

    The distance is in robust standard deviations, which a few outliers do not affect, and must be large enough to
    matter.
    """
    if len(rates) < FEWEST_NODES:
        return {}
    usual = statistics.median(rates.values())
    distances = {key: math.log(usual / rate) for key, rate in rates.items()}
    deviation = max(_OF_MAD * statistics.median(map(abs, distances.values())), scatter)
    far = statistics.NormalDist().inv_cdf(1 - _FALSE_ALARM / len(rates)) * deviation
    return {key: (rates[key], usual) for key, d in distances.items() if d > far and rates[key] < _MATTERS * usual}


def _scatter(links: Sequence[Link]) -> float:
    """Return the relative scatter of a rate, from its own transfers: the median over links."""
    own = []
    for link in links:
        middle = statistics.median(link.seconds)
        own.append(
            _OF_MAD * statistics.median(abs(s / middle - 1) for s in link.seconds) / math.sqrt(len(link.seconds))
        )
    return max(statistics.median(own), _SCATTER)


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds that contain every pair of nodes once. Each node is in at most one pair per round."""
    seats = [*range(nodes), *([-1] if nodes % 2 else [])]
    half, played = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        played.append([(a, b) for a, b in pairs if min(a, b) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return played
