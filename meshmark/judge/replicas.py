"""Replicas that may differ by design: which ranks and quantities belong to which replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from meshmark.judge.deviation import Quantity
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout

T = TypeVar("T")


def replica_of(layout: Layout, rank: int) -> int:
    """Return the data-parallel replica of `rank`. The ranks of one replica hold one state."""
    return layout.coordinates(rank).dp


def num_replicas(case: Case) -> int:
    """Return the number of replicas with distinct states. It is one if all must hold the same."""
    return case.layout.dp if case.workload.algorithm.replicas_differ else 1


def replicas_of_ranks(case: Case) -> list[int]:
    """Return the replica of each rank."""
    return [replica_of(case.layout, r) if num_replicas(case) > 1 else 0 for r in range(case.world_size)]


def by_replica(values: Mapping[Quantity, T], num_replicas: int) -> list[dict[Quantity, T]]:
    """Split values by replica. Their quantities then have no replica, as if there were only one."""
    if num_replicas == 1:
        return [dict(values)]
    return [{replace(q, replica=None): v for q, v in values.items() if q.replica == r} for r in range(num_replicas)]
