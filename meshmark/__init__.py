"""Meshmark: benchmark and conformance suite for distributed training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshmark import moved

if TYPE_CHECKING:
    import pandas as pd

    from meshmark.user_workload import Workload as Workload

__version__ = "0.1.0"

moved.install()


def load(folder: str | Path) -> pd.DataFrame:
    """Load a results folder as a table with one row per case; see `meshmark.report.frame.load`."""
    from meshmark.report import frame  # pandas takes half a second, which only its users should pay

    return frame.load(folder)


def __getattr__(name: str) -> type:
    """Return `Workload`, the class that a user's own workload derives from."""
    if name != "Workload":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from meshmark.user_workload import Workload  # not at the top, for every folder imports this module first

    return Workload
