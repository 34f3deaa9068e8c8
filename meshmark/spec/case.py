"""The unit of measurement: one adapter, workload, layout and precision, and its tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.errors import LayoutError
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.tuning import Tuning
from meshmark.spec.workload import Workload

CHOOSE = "choose another --world, --layouts, --global-batch, --workload, --model or --adapters"
"""Advice appended to errors about layouts that do not fit."""
_PLAIN = Tuning()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix, whether or not its layout fits its workload."""

    adapter: str
    workload: Workload
    layout: Layout
    precision: Precision = Precision.FP32
    tuning: Tuning = Tuning()

    @property
    def id(self) -> str:
        return "-".join([self.adapter, self.layout.id, self.workload.id, *self.computed])

    @property
    def computed(self) -> list[str]:
        """The names of the precision and, if there is one, of the tuning."""
        return [str(self.precision), *([str(self.tuning)] if self.tuning else [])]


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
class InvalidLayout(Cell):
    """A cell whose layout does not fit its workload. It is skipped, with a reason."""

    reason: str


def cell(
    *,
    adapter: str,
    workload: Workload,
    layout: Layout,
    precision: Precision = Precision.FP32,
    tuning: Tuning = _PLAIN,
) -> Case | InvalidLayout:
    """Return the case of these arguments, or an `InvalidLayout` that says why there is none."""
    try:
        return Case(adapter=adapter, workload=workload, layout=layout, precision=precision, tuning=tuning)
    except LayoutError as error:
        return InvalidLayout(
            adapter=adapter,
            workload=workload,
            layout=layout,
            precision=precision,
            tuning=tuning,
            reason=str(error),
        )


def expect_fit(cells: Sequence[Cell]) -> None:
    """Raise `LayoutError` with every reason if there are cells but none of them is a case."""
    misfits = {cell.id: f"{cell.adapter}: {cell.reason}" for cell in cells if isinstance(cell, InvalidLayout)}
    if misfits and not any(isinstance(cell, Case) for cell in cells):
        raise LayoutError(f"{'; '.join(misfits.values())}; {CHOOSE}")
