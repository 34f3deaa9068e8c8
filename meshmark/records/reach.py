"""How far traffic travels: within a node, to another node of the same switch, or beyond the switch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshmark.measure.readings import TrafficReading, wire_factor
from meshmark.theory.flow import Flow, TrafficException, by_route, departed


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The node and switch that a rank runs on."""

    node: int = 0
    switch: str = ""
    """Path of switches above its node, from the top of the tree. Empty if no scheduler reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Bytes that all ranks together send in one step, under ring algorithms.

    A ring visits the ranks of a node, and the nodes of a switch, one after the other, as NCCL's do. An all-to-all
    sends equally to every peer.
    """

    within_nodes: float
    between_nodes: float
    """Bytes between nodes of one switch, or between any nodes if switches are unknown."""
    between_switches: float


Sent = tuple[int, str, tuple[int, ...], int]
"""Sending rank, kind of collective, its ranks, and bytes of the full tensors."""


def measured_traffic(readings: Sequence[TrafficReading]) -> list[Sent]:
    return [(rank, c.kind, c.ranks, c.num_bytes) for rank, read in enumerate(readings) for c in read.asked]


def planned_traffic(
    flows: Sequence[list[Flow] | None], traffic_exceptions: Sequence[list[TrafficException]]
) -> list[Sent] | None:
    """Return the traffic that theory predicts, with the exceptions that adapters declare.

    None if theory makes no prediction, or an adapter could not be asked.
    """
    sent = list[Sent]()
    if not flows or len(flows) != len(traffic_exceptions):
        return None
    for rank, (theirs, declared) in enumerate(zip(flows, traffic_exceptions, strict=True)):
        if theirs is None:
            return None
        routes = by_route(departed(theirs, declared))
        sent += [(rank, kind, ranks, flow.num_bytes) for (kind, ranks), flow in routes.items()]
    return sent


def reach(sent: Iterable[Sent] | None, places: Sequence[Place]) -> Reach | None:
    """Return how far the traffic travels, or None for an unknown kind of collective or unknown places."""
    if sent is None or not places:
        return None
    parts: dict[str, list[float]] = {"within_nodes": [], "between_nodes": [], "between_switches": []}
    for rank, kind, ranks, num_bytes in sent:
        total = num_bytes * wire_factor(kind, len(ranks))
        if math.isnan(total):
            return None
        for peer, share in _peers(rank, kind, ranks, places) if total else ():
            parts[_distance(places[rank], places[peer])].append(total * share)
    return Reach(**{name: math.fsum(values) for name, values in parts.items()})


def _peers(rank: int, kind: str, ranks: tuple[int, ...], places: Sequence[Place]) -> Iterator[tuple[int, float]]:
    """Yield the ranks that `rank` sends to, each with its share."""
    if kind == "all_to_all":
        yield from ((peer, 1 / (len(ranks) - 1)) for peer in ranks if peer != rank)
        return
    ring = sorted(ranks, key=lambda r: (places[r].switch, places[r].node, r))
    yield ring[(ring.index(rank) + 1) % len(ring)], 1.0


def _distance(one: Place, other: Place) -> str:
    if one.node == other.node:
        return "within_nodes"
    return "between_nodes" if one.switch == other.switch else "between_switches"
