"""Measure several things in alternation, so that the load of a machine falls on all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_rounds(calls: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Return what each call measured, once a round. The first `warm_up` rounds are left out.

    Each round begins with the call after the one that the last round began with, so that none always follows the
    same other.
    """
    names, found = list(calls), dict[str, list[T]]({name: [] for name in calls})
    for index in range(warm_up + rounds):
        at = index % len(names)
        for name in names[at:] + names[:at]:
            value = calls[name]()
            if index >= warm_up:
                found[name].append(value)
    return found
