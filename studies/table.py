"""A published table beside what the planner computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published number and the planner's."""

    published: float
    computed: float
    flagged: str = ""
    """Why the source is wrong here; such cells are not in the summary."""

    @property
    def error(self) -> float:
        """Signed, relative to the published number."""
        return self.computed / self.published - 1.0 if self.published else float("nan")


@dataclass(frozen=True, kw_only=True)
class Table:
    """One published table."""

    title: str
    source: str
    formula: str
    """Formula that the planner computes, with the paper and equation; empty for facts that nothing computes."""
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    """Names of the compared quantities."""
    rows: Sequence[tuple[tuple[str, ...], tuple[Cell | None, ...]]]
    notes: list[str] = field(default_factory=list)
    measured: str = ""
    """Where the suites measure the same at small scale."""

    @property
    def cells(self) -> list[Cell]:
        return [cell for _, cells in self.rows for cell in cells if cell]
