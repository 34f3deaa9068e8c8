"""DDP that tells Meshmark wrong things, or ends the process that asks: no case's record may be lost by it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.ddp import DDP
from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe


class ExitsInRecipe(DDP):
    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        sys.exit("planted in recipe")


class ExitsInModules(DDP):
    @classmethod
    def modules(cls) -> list[str]:
        sys.exit("planted in modules")


class RaisesInSupports(DDP):
    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        raise ArithmeticError("planted in supports")


class TellsNumPy(DDP):
    """JSON has none of its integers."""

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return (ExtraMemory(category="gradients", num_bytes=np.int64(0), reason="planted"),)


class ExitsWell(DDP):
    """Every rank, with exit code 0 and without a report."""

    def build(self, case: Case, context: RankContext) -> Engine:
        os._exit(0)


class MovesResults(DDP):
    """While its case runs, as somebody in another terminal may."""

    @classmethod
    def modules(cls) -> list[str]:
        results = Path(os.environ["MESHMARK_TEST_RESULTS"])
        results.rename(results.with_name("moved"))
        return []
