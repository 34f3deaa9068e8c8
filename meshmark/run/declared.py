"""What is known of a case beforehand: what each rank is to hold and to send, by theory and by what adapters declare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from meshmark.adapter.contract import Adapter
from meshmark.clip import told
from meshmark.spec.case import Case
from meshmark.theory.flow import Departure, Flow, departed
from meshmark.theory.states import ModelStates, Remainder, model_states
from meshmark.theory.traffic import step_traffic

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """By rank."""

    states: list[ModelStates | None]
    remainders: list[list[Remainder]]
    traffic: list[list[Flow] | None]
    """By theory alone."""
    departures: list[list[Departure]]
    failed: dict[str, str] = field(default_factory=dict)
    """By suite that cannot be judged by it: the method that failed, and how."""


def declare(adapter: type[Adapter], case: Case, ranks: Sequence[int]) -> Declared:
    """An adapter's method that fails takes the verdict that rests on it, and no other."""
    failed: dict[str, str] = {}

    def ask(suite: str, method: str, answer: Callable[[int], T]) -> list[T]:
        try:
            return [answer(rank) for rank in ranks]
        except (Exception, SystemExit) as error:  # whatever an adapter does wrong
            failed.setdefault(suite, f"Adapter.{method} raised {told(error)}")
            return []

    return Declared(
        states=ask("memory", "recipe", lambda rank: model_states(case, rank, adapter.recipe(case))),
        remainders=ask("memory", "remainders", lambda rank: _remainders(adapter.remainders(case, rank))),
        traffic=[step_traffic(case, rank) for rank in ranks],
        departures=ask(
            "communication", "departures", lambda rank: _departures(case, rank, adapter.departures(case, rank))
        ),
        failed=failed,
    )


def _remainders(told: Sequence[object]) -> list[Remainder]:
    for remainder in told:
        if not isinstance(remainder, Remainder):
            raise TypeError(f"got {remainder!r} among the remainders, expected a Remainder")
    return [remainder for remainder in told if isinstance(remainder, Remainder)]


def _departures(case: Case, rank: int, told: Sequence[object]) -> list[Departure]:
    """Raises `ValueError` where they depart from what theory does not say."""
    for departure in told:
        if not isinstance(departure, Departure):
            raise TypeError(f"got {departure!r} among the departures, expected a Departure")
    departures = [departure for departure in told if isinstance(departure, Departure)]
    departed(step_traffic(case, rank) or [], departures)
    return departures
