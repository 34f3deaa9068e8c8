"""DDP whose adapter comes to grief outside of any rank: in the process that launches, judges and records."""

from __future__ import annotations

from meshmark.adapter.capabilities import Feature
from meshmark.adapters.ddp import DDP
from meshmark.spec.case import Case
from meshmark.theory.recipe import TrainingRecipe


class NoRecipe(DDP):
    """After the launch."""

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        raise LookupError("planted in the recipe")


class NoEnvironment(DDP):
    """Before the launch: its case is recorded as unfinished, and the next one runs."""

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        raise LookupError("planted in the environment")


class NoRefusal(DDP):
    """Before the runner stands."""

    @classmethod
    def refusal(cls, case: Case, device: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        raise LookupError("planted in the refusal")
