"""How far predictions are from measurements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.theory.grid import Column


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors |predicted - measured| / measured of some rows, and how well their order is kept."""

    num_rows: int
    mean: float
    median: float
    worst: float
    within_goal: float
    """Share of rows within the goal."""
    rank_correlation: float
    """Spearman's; NaN for fewer than three rows."""


def errors_of(predicted: Column, measured: Column, goal: float) -> Errors:
    """Errors over the rows where both are numbers."""
    known = np.isfinite(predicted) & np.isfinite(measured)
    p, m = predicted[known], measured[known]
    if not len(p):
        return Errors(num_rows=0, mean=np.nan, median=np.nan, worst=np.nan, within_goal=np.nan, rank_correlation=np.nan)
    error = np.abs(p / m - 1.0)
    return Errors(
        num_rows=len(p),
        mean=float(error.mean()),
        median=float(np.median(error)),
        worst=float(error.max()),
        within_goal=float((error <= goal).mean()),
        rank_correlation=_spearman(p, m),
    )


def error_cells(errors: Errors) -> str:
    """A row of a report: rows, mean, median, largest, share within the goal, rank correlation."""

    def percent(value: float) -> str:
        return "-" if np.isnan(value) else f"{100 * value:.1f}"

    rank = "-" if np.isnan(errors.rank_correlation) else f"{errors.rank_correlation:.3f}"
    return (
        f"{errors.num_rows} | {percent(errors.mean)} | {percent(errors.median)} | {percent(errors.worst)} | "
        f"{percent(errors.within_goal)} | {rank}"
    )


def _spearman(a: Column, b: Column) -> float:
    if len(a) < 3:
        return float("nan")
    first, second = _ranks(a), _ranks(b)
    if first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(((first - first.mean()) * (second - second.mean())).mean() / first.std() / second.std())


def _ranks(values: Column) -> Column:
    """Ranks, ties shared."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle: Column = (ends - (counts - 1) / 2.0)[inverse]
    return middle
