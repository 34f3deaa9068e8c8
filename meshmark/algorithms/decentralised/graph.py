"""Who mixes whose state in, and by how much: graphs of replicas and their mixing matrices.

A matrix W has a row a replica: x_i becomes the sum over j of W[i][j] x_j. It must be doubly stochastic, so that a mean
over replicas stays what it is, and over its period connected, so that they agree in the end.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import InputError

Matrix = tuple[tuple[float, ...], ...]
STOCHASTIC = 1e-9
"""Difference from one allowed in a sum of weights: the rounding of as many terms as there are replicas."""


class GraphKind(StrEnum):
    RING = "ring"
    """Neighbours on a circle, of equal weight with oneself."""
    GRID = "grid"
    """The most square grid of so many, with the weights of Metropolis and Hastings (Xiao and Boyd 2004):
    1 / (1 + the larger degree), and oneself the rest."""
    EXPONENTIAL = "exponential"
    """i hears from i - 1, i - 2, i - 4, ... (arXiv:2110.13363), all of equal weight with oneself."""
    ONE_PEER = "one-peer"
    """A single one of these neighbours at each step, in turn, with weight one half (arXiv:2110.13363)."""
    MATCHING = "matching"
    """Pairs drawn anew for every step, half and half; of an odd number one stays alone."""
    OWN = "own"
    """Whatever matrix is given."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Raises `InputError` for a matrix that is not doubly stochastic or not connected, with the place."""

    kind: GraphKind
    seed: int = 0
    """Seed of a matching's draws."""
    rows: Matrix = ()
    """Rows of the matrix of kind own."""

    def __post_init__(self) -> None:
        if (self.kind is GraphKind.OWN) != bool(self.rows):
            raise InputError(f"graph: {len(self.rows)} rows for kind {self.kind}; they are what kind own takes, alone")
        if self.seed and self.kind is not GraphKind.MATCHING:
            raise InputError(f"graph: seed {self.seed} means nothing to kind {self.kind}, which draws nothing")
        if self.rows:
            check_mixing([self.rows])

    @property
    def id(self) -> str:
        if self.kind is GraphKind.OWN:
            return f"own{hashlib.blake2b(repr(self.rows).encode(), digest_size=3).hexdigest()}"
        return f"{self.kind}{self.seed or ''}"

    @property
    def is_static(self) -> bool:
        """Whether every step mixes by the same matrix."""
        return self.kind not in (GraphKind.ONE_PEER, GraphKind.MATCHING)

    def refusal(self, count: int) -> str | None:
        """Why it is no graph of `count` replicas."""
        if self.rows and len(self.rows) != count:
            return f"a graph of {len(self.rows)} nodes over {count} replicas"
        return None

    def matrix(self, count: int, step: int) -> Matrix:
        """Return the matrix by which `step` (counted from 0) mixes `count` replicas."""
        assert self.refusal(count) is None, self.refusal(count)
        if self.rows:
            return self.rows
        if self.kind is GraphKind.GRID:
            return _metropolis([_on_grid(i, count) for i in range(count)])
        return tuple(_equal(self._heard(i, count, step) | {i}, count) for i in range(count))

    def _heard(self, i: int, count: int, step: int) -> set[int]:
        hops = [2**k for k in range(math.ceil(math.log2(count)))] if count > 1 else []
        match self.kind:
            case GraphKind.RING:
                return {(i - 1) % count, (i + 1) % count}
            case GraphKind.EXPONENTIAL:
                return {(i - hop) % count for hop in hops}
            case GraphKind.ONE_PEER:
                return {(i - hops[step % len(hops)]) % count} if hops else set()
            case _:
                order = sorted(range(count), key=lambda node: _drawn(self.seed, step, node))
                place = order.index(i) ^ 1
                return {order[place]} if place < count else set()

    def weights(self, count: int, step: int, replica: int) -> dict[int, float]:
        """Whom `replica` hears, itself too, and by how much each counts."""
        return {j: weight for j, weight in enumerate(self.matrix(count, step)[replica]) if weight}

    def hears(self, count: int, step: int, replica: int) -> list[int]:
        """The others whose states reach `replica`."""
        return [j for j in self.weights(count, step, replica) if j != replica]

    def recipients(self, count: int, step: int, replica: int) -> list[int]:
        """The others whom the state of `replica` reaches."""
        return [i for i, row in enumerate(self.matrix(count, step)) if row[replica] and i != replica]


def check_mixing(matrices: Sequence[Matrix]) -> None:
    """Raises `InputError` unless all are square and doubly stochastic and, together, connected."""
    for rows in matrices:
        _check_stochastic(rows)
    count = len(matrices[0])
    reached = {0}
    for _ in range(count):
        for rows in matrices:
            reached |= {i for i in range(count) if any(rows[i][j] or rows[j][i] for j in reached)}
    if missing := sorted(set(range(count)) - reached):
        raise InputError(
            f"graph: not connected: nothing of replica 0 ever reaches {', '.join(map(str, missing))}; add an edge to it"
        )


def lazy(rows: Matrix) -> Matrix:
    """(I + W) / 2, no eigenvalue of which is negative where W is symmetric."""
    return tuple(tuple((weight + (i == j)) / 2 for j, weight in enumerate(row)) for i, row in enumerate(rows))


def _check_stochastic(rows: Matrix) -> None:
    for i, row in enumerate(rows):
        if len(row) != len(rows):
            raise InputError(f"graph: row {i} has {len(row)} weights, expected {len(rows)}, one a row")
        for j, weight in enumerate(row):
            if not 0 <= weight <= 1:
                raise InputError(f"graph: weight {weight:g} at row {i}, column {j}; expected 0 to 1")
    lines = [("row", i, sum(row)) for i, row in enumerate(rows)]
    lines += [("column", j, sum(column)) for j, column in enumerate(zip(*rows, strict=True))]
    for what, place, total in lines:
        if abs(total - 1) > STOCHASTIC:
            raise InputError(
                f"graph: {what} {place} sums to {total:g}, expected 1: rows, or a replica would shrink or grow, and "
                "columns, or the mean over replicas would move"
            )


def _equal(heard: set[int], count: int) -> tuple[float, ...]:
    return tuple(1 / len(heard) if j in heard else 0.0 for j in range(count))


def _metropolis(neighbours: Sequence[set[int]]) -> Matrix:
    count = len(neighbours)
    rows = [[0.0] * count for _ in neighbours]
    for i, near in enumerate(neighbours):
        for j in near:
            rows[i][j] = 1 / (1 + max(len(near), len(neighbours[j])))
        rows[i][i] = 1 - sum(rows[i])
    return tuple(map(tuple, rows))


def _on_grid(node: int, count: int) -> set[int]:
    width = next(w for w in range(math.isqrt(count), 0, -1) if count % w == 0)
    row, column = divmod(node, width)
    near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return {r * width + c for r, c in near if 0 <= r < count // width and 0 <= c < width}


def _drawn(seed: int, step: int, node: int) -> bytes:
    """The same on every rank, with nothing sent."""
    return hashlib.blake2b(f"{seed}/{step}/{node}".encode(), digest_size=8).digest()
