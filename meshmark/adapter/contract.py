"""The one interface that every framework is put behind.

An `Adapter` says what its framework can do and builds an `Engine` inside each rank; an engine trains. Neither times
nor judges itself: meters watch from outside.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any, ClassVar

from meshmark.adapter.arithmetic import Arithmetic
from meshmark.adapter.buckets import rebuilt_buckets
from meshmark.adapter.capabilities import Capabilities, Feature, Requirement
from meshmark.adapter.engine import Engine, RankContext
from meshmark.environment import interpreter_of
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.theory.flow import OneTimeTraffic, TrafficException
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.states import ExtraMemory


class Track(StrEnum):
    """Who makes the choices that a framework leaves to its user."""

    THEORY = "as theory says"
    """Every choice is explicit, so that memory and traffic are those of the layout."""
    AUTHORS = "as its authors recommend"
    """Documented defaults and tuning, such as prefetching and reuse. The adapter's name ends in `-recommended`."""


_RENAMED = {"remainders": "extra_memory", "departures": "traffic_exceptions"}
"""Methods of an adapter by their names in the version before this."""


class Adapter(ABC):
    """An adapter for one framework, with its choices made.

    Its module must be importable without the framework: the framework is imported in `build`.
    """

    track: ClassVar[Track] = Track.THEORY
    requires: ClassVar[tuple[Requirement, ...]] = ()
    virtual_environment: ClassVar[str] = ""
    """Name of the virtual environment that ranks start in, for a framework whose pins do not fit Meshmark's own; empty
    for the one that Meshmark runs in. `make env NAME=...` makes it, with environments/NAME.txt for its constraints."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that `build` will import besides, slow enough to be worth importing once for all ranks."""
    arithmetic: ClassVar[Arithmetic | None] = None
    """How it computes what a mixed precision leaves open, for a twin in one process to do the same; None where none is
    to, and gradients are held against float64 alone."""
    capabilities: ClassVar[Capabilities]
    known_gaps: ClassVar[tuple[KnownGap, ...]] = ()

    @abstractmethod
    def build(self, case: Case, context: RankContext) -> Engine:
        """An engine ready for its first step, holding the workload's initial values."""

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """Variables that the framework reads when it is imported."""
        return {}

    @classmethod
    def modules(cls) -> list[str]:
        """Return the modules that ranks will import; none if the framework is not installed."""
        if cls.virtual_environment:  # another interpreter, whose packages are not seen from here
            return [*(r.module for r in cls.requires), *cls.preload]
        return [*(r.module for r in cls.requires), *cls.preload] if not any(r.missing for r in cls.requires) else []

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """How this framework keeps a model in training: what the planner's memory follows from."""
        return eager_recipe(case)

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Take what an adapter written for an older version calls by its old name, with a `DeprecationWarning`."""
        super().__init_subclass__(**kwargs)
        for old, new in _RENAMED.items():
            if old in cls.__dict__ and new not in cls.__dict__:
                warnings.warn(
                    f"{cls.__name__}.{old} is now called {new}; the old name works until the next minor version",
                    DeprecationWarning,
                    stacklevel=2,
                )
                setattr(cls, new, cls.__dict__[old])

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return where this framework's states or activations are known to differ from the closed form.

        The closed form is that of its recipe and layout. `rank` is the rank that is asked about.
        """
        return ()

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return where this framework is known to send otherwise than theory says.

        Theory is `meshmark.theory.traffic.step_traffic`, which every case is held to. Where steps differ, the
        exceptions are those of that module's `METERED_STEP`.
        """
        return ()

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """Return whether it is known what this framework sends; what is not is *not judged*."""
        return True

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Return what this framework sends in some steps besides what it sends in all, to set itself up.

        All steps of a run must send what the metered step sends, and this. `rank` is the rank that is asked about. By
        default it is what PyTorch's DistributedDataParallel sends in the second step, for many frameworks wrap it.
        """
        return (rebuilt_buckets(case),) if case.layout.dp > 1 else ()

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Deprecated: call `extra_memory`."""
        warnings.warn("Adapter.remainders is now called extra_memory", DeprecationWarning, stacklevel=2)
        return cls.extra_memory(case, rank)

    @classmethod
    def departures(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Deprecated: call `traffic_exceptions`."""
        warnings.warn("Adapter.departures is now called traffic_exceptions", DeprecationWarning, stacklevel=2)
        return cls.traffic_exceptions(case, rank)

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """Why the framework cannot run `case` on `device` ("cpu" or "cuda") over `backend` ("gloo" or "nccl"); None
        when it can. Its capabilities know, unless an adapter has more to say."""
        return cls.capabilities.refusal(case, device, backend)

    @classmethod
    def refusal(cls, case: Case, device: str, backend: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Why `case` must be skipped: unsupported, or not installed. None when it can run. `needs`: what the pass takes
        beyond the case."""
        reason, lacking = cls.supports(case, device, backend), cls.capabilities.lacking(needs)
        if reason or lacking:
            return ", ".join([reason or f"{case.adapter} does not support {lacking.pop(0)}", *lacking])
        if name := cls.virtual_environment:
            there = interpreter_of(name).exists()
            return None if there else f"the environment {name} of {case.adapter} is not there: make env NAME={name}"
        return next((reason for requirement in cls.requires if (reason := requirement.missing)), None)
