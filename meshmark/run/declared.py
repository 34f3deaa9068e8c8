"""What an adapter says of a case beforehand: what each rank is to hold and to send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from meshmark.adapter.contract import Adapter
from meshmark.spec.case import Case
from meshmark.theory.states import ModelStates, Remainder, model_states

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """By rank."""

    states: list[ModelStates | None]
    remainders: list[list[Remainder]]
    traffic: list[dict[str, float] | None]
    failed: dict[str, str] = field(default_factory=dict)
    """By suite that cannot be judged by it: the method that failed, and how."""


def declare(adapter: type[Adapter], case: Case, ranks: Sequence[int]) -> Declared:
    """An adapter's method that fails takes the verdict that rests on it, and no other."""
    failed: dict[str, str] = {}

    def ask(suite: str, method: str, answer: Callable[[int], T]) -> list[T]:
        try:
            return [answer(rank) for rank in ranks]
        except (Exception, SystemExit) as error:  # whatever an adapter does wrong
            failed.setdefault(suite, f"Adapter.{method} raised {type(error).__name__}: {error}")
            return []

    return Declared(
        states=ask("memory", "recipe", lambda rank: model_states(case, rank, adapter.recipe(case))),
        remainders=ask("memory", "remainders", lambda rank: _remainders(adapter.remainders(case, rank))),
        traffic=ask("communication", "traffic", lambda rank: _traffic(adapter.traffic(case, rank))),
        failed=failed,
    )


def _remainders(told: Sequence[object]) -> list[Remainder]:
    for remainder in told:
        if not isinstance(remainder, Remainder):
            raise TypeError(f"got {remainder!r} among the remainders, expected a Remainder")
    return [remainder for remainder in told if isinstance(remainder, Remainder)]


def _traffic(told: object) -> dict[str, float] | None:
    if told is None:
        return None
    if not isinstance(told, dict):
        raise TypeError(f"got {told!r}, expected bytes by kind of collective, or None where they are not planned")
    return {str(kind): float(num_bytes) for kind, num_bytes in told.items()}
