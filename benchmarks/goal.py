"""How every benchmark ends."""

from __future__ import annotations


def verdict(name: str, value: float, goal: float, *, at_least: bool) -> bool:
    """Print `NAME VALUE goal GOAL met|missed`; returns whether it was met."""
    met = value >= goal if at_least else value <= goal
    print(f"{name} {value:.3g} goal {goal:g} {'met' if met else 'missed'}")
    return met
