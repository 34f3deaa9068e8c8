"""All mutants, as adapters: every mutant's name is an attribute of this module, the adapter with the defect, so that a
launch can be told `tests.broken.mutants:ddp_OverMicroBatches`."""

from __future__ import annotations

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.spec.case import Case
from tests.broken.algorithms import ALGORITHM_MUTANTS
from tests.broken.clause_mutants import CLAUSE_MUTANTS
from tests.broken.engine import Broken, breaks
from tests.broken.mutant import LAYOUTS, layout_of
from tests.broken.narrow import NARROW_MUTANTS
from tests.broken.roster import ROSTER_MUTANTS
from tests.broken.sizes import SIZED
from tests.broken.suite_mutants import SUITE_MUTANTS

MUTANTS = [*SUITE_MUTANTS, *ALGORITHM_MUTANTS, *CLAUSE_MUTANTS, *NARROW_MUTANTS]
BROKEN_ADAPTERS = LAYOUTS | {mutant.adapter: layout_of(mutant.adapter) for mutant in MUTANTS}
"""Layouts of the adapters that mutants break, and ZeRO stages of those that have several."""
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
_ALL = BY_NAME | {mutant.name: mutant for mutant in ROSTER_MUTANTS}
_BY = "_off_by_"


def sized(adapter: str, kind: str, by: float) -> str:
    """Name of the adapter with the defect `kind` of SIZED, off by so much: an identifier, 3e-06 is 3em06 in it."""
    return f"{adapter}_{kind}{_BY}{by:.3g}".replace(".", "p").replace("-", "m")


def target(name: str) -> str:
    """Return the target that a launcher is given."""
    return f"{__name__}:{name}"


def __getattr__(name: str) -> type[Adapter]:
    if _BY in name:
        start, _, by = name.partition(_BY)
        adapter, _, kind = start.partition("_")
        return _broken(adapter, type(name, (SIZED[kind],), {"by": float(by.replace("p", ".").replace("m", "-"))}))
    if name not in _ALL:
        raise AttributeError(name)
    return _broken(_ALL[name].adapter.partition("/")[0], _ALL[name].defect)


def _broken(adapter: str, defect: type[Broken] | type[Adapter]) -> type[Adapter]:
    real = load_adapter(builtin_adapters()[adapter])
    if issubclass(defect, Adapter):
        return type(defect.__name__, (defect, real), {})

    def build(self: Adapter, case: Case, context: RankContext) -> Engine:
        engine: Engine = breaks(real.build(self, case, context), defect)
        return engine

    return type(defect.__name__, (real,), {"build": build})
