"""Replicas that may differ by design: which rank is whose, and what their quantities are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

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


def of_replica(quantity: str, replica: int, num_replicas: int) -> str:
    """`loss` and `gradients/NAME` of one of several: `loss/replica1`, `gradients/replica1:NAME`."""
    if num_replicas == 1:
        return quantity
    kind, slash, name = quantity.partition("/")
    return f"{kind}/replica{replica}" + (f":{name}" if slash else "")


def by_replica(values: Mapping[str, T], num_replicas: int) -> list[dict[str, T]]:
    """Each replica's own, under the names that they have where there is but one."""
    return [only_replica(values, r) for r in range(num_replicas)] if num_replicas > 1 else [dict(values)]


def only_replica(values: Mapping[str, T], replica: int) -> dict[str, T]:
    """Those of one of several replicas, under the names that they have where there is but one."""
    found = {}
    for quantity, value in values.items():
        kind, _, rest = quantity.partition("/")
        whose, colon, name = rest.partition(":")
        if whose == f"replica{replica}":
            found[f"{kind}/{name}" if colon else kind] = value
    return found
