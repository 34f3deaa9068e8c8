"""What is measured: one adapter, workload, layout and precision."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix. Its id is stable, readable and what pytest's `-k` selects on.

    Raises `LayoutError` when the layout cannot be laid over the workload.
    """

    adapter: str
    workload: Workload
    layout: Layout
    precision: Precision = Precision.FP32

    def __post_init__(self) -> None:
        self.layout.check(self.workload.model, self.workload.global_batch)

    @property
    def id(self) -> str:
        return f"{self.adapter}-{self.layout.id}-{self.workload.name}-{self.precision}"

    @property
    def world_size(self) -> int:
        return self.layout.world_size
