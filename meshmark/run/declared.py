"""What is known of a case beforehand: what each rank is to hold and to send, by theory and by what adapters declare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from meshmark.adapter.contract import Adapter
from meshmark.clip import told
from meshmark.spec.case import Case
from meshmark.theory.flow import Flow, OneTimeTraffic, TrafficException, departed
from meshmark.theory.states import ExtraMemory, ModelStates, model_states
from meshmark.theory.traffic import step_traffic

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """By rank."""

    states: list[ModelStates | None]
    extra_memory: list[list[ExtraMemory]]
    traffic: list[list[Flow] | None]
    """By theory alone."""
    traffic_exceptions: list[list[TrafficException]]
    one_time_traffic: list[list[OneTimeTraffic]]
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

    planned = adapter.plans_traffic(case)
    return Declared(
        states=ask("memory", "recipe", lambda rank: model_states(case, rank, adapter.recipe(case))),
        extra_memory=ask("memory", "extra_memory", lambda rank: _extra_memory(adapter.extra_memory(case, rank))),
        traffic=[step_traffic(case, rank) if planned else None for rank in ranks],
        traffic_exceptions=ask(
            "communication",
            "traffic_exceptions",
            lambda rank: _exceptions(case, rank, adapter.traffic_exceptions(case, rank) if planned else ()),
        ),
        one_time_traffic=ask(
            "communication",
            "one_time_traffic",
            lambda rank: _one_time_traffic(adapter.one_time_traffic(case, rank)),
        ),
        failed=failed,
    )


def _extra_memory(declared: Sequence[object]) -> list[ExtraMemory]:
    for each in declared:
        if not isinstance(each, ExtraMemory):
            raise TypeError(f"got {each!r} among the extra memory, expected an ExtraMemory")
    return [each for each in declared if isinstance(each, ExtraMemory)]


def _one_time_traffic(declared: Sequence[object]) -> list[OneTimeTraffic]:
    for each in declared:
        if not isinstance(each, OneTimeTraffic):
            raise TypeError(f"got {each!r} among the one-time traffic, expected a OneTimeTraffic")
    return [each for each in declared if isinstance(each, OneTimeTraffic)]


def _exceptions(case: Case, rank: int, declared: Sequence[object]) -> list[TrafficException]:
    """Raises `ValueError` where they replace what theory does not say."""
    for each in declared:
        if not isinstance(each, TrafficException):
            raise TypeError(f"got {each!r} among the traffic exceptions, expected a TrafficException")
    traffic_exceptions = [each for each in declared if isinstance(each, TrafficException)]
    departed(step_traffic(case, rank) or [], traffic_exceptions)
    return traffic_exceptions
