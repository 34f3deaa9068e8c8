"""How far each table's numbers may be off in the mean before `make tables` fails, by what the numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from studies.table import Table

_CLOSED_FORM, _ROUNDED, _FITTED = 0.005, 0.025, 0.01
"""Formulas against a paper's own; against sizes that a paper prints with two digits; times that rates were fitted
to."""
_HELD, _LAYER, _TWIN = 0.05, 0.10, 0.25
"""Measured memory; predicted times of layers and iterations; of whole steps on cores that nobody fitted to, and that
may be shared while they are measured."""
BOUNDS = {
    "GPipe table 1: largest model": _ROUNDED,
    "ZeRO table 2: largest model": 0.20,  # largest models that ran, which need not be the largest that fit
    "ZeRO table 2, twin": _HELD,
    "Megatron-LM 2019 table 1": _CLOSED_FORM,
    "Activations of a 10B model by batch": _CLOSED_FORM,
    "Activations, twin": _HELD,
    "LLaMA parameters": _CLOSED_FORM,
    "GPT-3 table 2.1": _CLOSED_FORM,
    "LLaMA table 2": _CLOSED_FORM,
    "ZeRO table 1: model states per device": _CLOSED_FORM,
    "ZeRO table 4: model sizes": _ROUNDED,
    "Korthikanti figures 1 and 7": _CLOSED_FORM,
    "DeepSpeed's estimator": _CLOSED_FORM,
    "GPipe table 2: normalised throughput": 0.40,  # equal stages, and no hand-over
    "GPipe table 2, twin": _TWIN,
    "Megatron SC21 table 1: weak scaling": _FITTED,
    "Megatron SC21 table 1, twin": _TWIN,
    "Megatron SC21 table 2: days for 300B tokens": _FITTED,
    "Korthikanti table 4: time of a layer": _LAYER,
    "Korthikanti table 5: iteration time": _LAYER,
    "Ring all-reduce against one-peer averaging": _LAYER,
    "Steps from a calibration": _TWIN,
    "Scalar claims": _CLOSED_FORM,
    "A100 peaks": _CLOSED_FORM,
}
"""By title; of tables that are compared with nothing, none."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One table against its bound."""

    title: str
    mean: float
    """Relative error of the cells that are not wrong in their source; not a number where none is left."""
    bound: float | None

    @property
    def holds(self) -> bool:
        """True if the error is within the bound; without a bound, if nothing in the table is compared."""
        return bool(np.isnan(self.mean)) if self.bound is None else self.mean <= self.bound

    @property
    def line(self) -> str:
        """`NAME VALUE bound BOUND held|BROKEN`."""
        bound = "none" if self.bound is None else f"{self.bound:.3f}"
        return f"{self.title}: {self.mean:.4f} bound {bound} {'held' if self.holds else 'BROKEN'}"


def judged(tables: Sequence[Table]) -> list[Judged]:
    """In their order; a bound without a table is one whose table has no cells left."""
    found = {table.title: [abs(cell.error) for cell in table.cells if not cell.flagged] for table in tables}
    titles = dict.fromkeys([*found, *BOUNDS])
    return [
        Judged(title=t, mean=float(np.mean(found[t])) if found.get(t) else float("nan"), bound=BOUNDS.get(t))
        for t in titles
    ]
