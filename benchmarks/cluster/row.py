"""What was tried and what became of it: a line of reports/cluster.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial."""

    engine: str
    """Who started the processes."""
    shape: str
    fault: str = "none"
    seconds: float | None = None
    """From the fault until it was noticed; of a run without one, what it took."""
    told: str = ""
    lost: str = "nothing"
    wrong: Sequence[str] = field(default_factory=list)
    """What should not have been."""
