"""What is measured: one adapter, workload, layout and precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.errors import LayoutError
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload

CHOOSE = "choose another --world, --layouts, --global-batch, --workload, --model or --adapters"
"""What to do about a layout that does not fit."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix, whether or not its layout fits its workload."""

    adapter: str
    workload: Workload
    layout: Layout
    precision: Precision = Precision.FP32

    @property
    def id(self) -> str:
        return f"{self.adapter}-{self.layout.id}-{self.workload.id}-{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Case(Cell):
    """A cell that can be measured. Its id is stable, readable and what pytest's `-k` selects on.

    Raises `LayoutError` when the layout cannot be laid over the workload.
    """

    def __post_init__(self) -> None:
        self.layout.check(self.workload.model, self.workload.global_batch)

    @property
    def world_size(self) -> int:
        return self.layout.world_size


@dataclass(frozen=True, kw_only=True)
class Misfit(Cell):
    """A cell that no launch can fill: a skip, with its reason."""

    reason: str


def cell(*, adapter: str, workload: Workload, layout: Layout, precision: Precision = Precision.FP32) -> Case | Misfit:
    """The case of these four, or why there is none."""
    try:
        return Case(adapter=adapter, workload=workload, layout=layout, precision=precision)
    except LayoutError as error:
        return Misfit(adapter=adapter, workload=workload, layout=layout, precision=precision, reason=str(error))


def expect_fit(cells: Sequence[Cell]) -> None:
    """Raise `LayoutError` with every reason when there are cells and none of them is a case."""
    misfits = {cell.id: f"{cell.adapter}: {cell.reason}" for cell in cells if isinstance(cell, Misfit)}
    if misfits and not any(isinstance(cell, Case) for cell in cells):
        raise LayoutError(f"{'; '.join(misfits.values())}; {CHOOSE}")
