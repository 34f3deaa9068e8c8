"""Replicas that may differ by design: which rank is whose, and which quantities are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from meshmark.judge.deviation import Quantity
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout

T = TypeVar("T")


def replica_of(layout: Layout, rank: int) -> int:
    """The data-parallel replica that `rank` belongs to: ranks of one replica hold one state."""
    return layout.coordinates(rank).dp


def num_replicas(case: Case) -> int:
    """Whose states are told apart: one where all are to hold the same."""
    return case.layout.dp if case.workload.algorithm.replicas_differ else 1


def replicas_of_ranks(case: Case) -> list[int]:
    """By rank."""
    return [replica_of(case.layout, r) if num_replicas(case) > 1 else 0 for r in range(case.world_size)]


def by_replica(values: Mapping[Quantity, T], num_replicas: int) -> list[dict[Quantity, T]]:
    """Each replica's own, as the quantities that they are where there is but one."""
    if num_replicas == 1:
        return [dict(values)]
    return [{replace(q, replica=None): v for q, v in values.items() if q.replica == r} for r in range(num_replicas)]
