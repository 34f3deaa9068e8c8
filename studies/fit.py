"""Robust least squares for the planner's few positive numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from meshmark.plan.rates import Rates
from meshmark.theory.grid import Column


def fit_rates(
    start: Rates,
    bounds: Mapping[str, tuple[float, float]],
    residual: Callable[[Rates], Column],
    *,
    scale: float = 0.05,
    prior_width: float = np.inf,
    num_rounds: int = 40,
) -> Rates:
    """`start` with the numbers in `bounds`, by dotted name, moved to where `residual` (relative errors) is least.

    Levenberg-Marquardt on the logarithms of the fields, within bounds, with Cauchy weights 1 / (1 + (r / scale)^2), so
    that rows which something else ruled (a slow node, a polling build) do not pull. A finite `prior_width` holds the
    logarithms near those of `start`, as a normal prior of that width would, so that what the rows do not determine
    stays there.
    """
    names, usual = list(bounds), start.numbers()
    low, high = (np.log([bounds[n][i] for n in names]) for i in (0, 1))
    at = np.clip(np.log([max(usual[n], 1e-30) for n in names]), low, high)

    def rates_at(logs: Column) -> Rates:
        return start.moved(dict(zip(names, np.exp(logs).tolist(), strict=True)))

    first = at

    def cost(errors: Column, logs: Column) -> float:
        return float(np.log1p((errors / scale) ** 2).sum() + (((logs - first) / prior_width) ** 2).sum())

    errors, damping = residual(rates_at(at)), 1e-2
    for _ in range(num_rounds):
        weights = 1.0 / np.sqrt(1.0 + (errors / scale) ** 2)
        jacobian = _jacobian(lambda logs: residual(rates_at(logs)), at, errors) * weights[:, None]
        held = (scale / prior_width) ** 2
        normal = jacobian.T @ jacobian + held * np.eye(len(at))
        slope = jacobian.T @ (errors * weights) + held * (at - first)
        for _ in range(8):
            damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
            step = np.clip(at - np.linalg.solve(damped, slope), low, high)
            moved = residual(rates_at(step))
            if cost(moved, step) < cost(errors, at):
                break
            damping *= 4.0
        else:
            break
        gain = cost(errors, at) - cost(moved, step)
        at, errors, damping = step, moved, max(damping / 3.0, 1e-6)
        if gain < 1e-4 * len(errors) * 1e-2:
            break
    return rates_at(at)


def _jacobian(function: Callable[[Column], Column], at: Column, value: Column) -> Column:
    """Forward differences, one column a parameter."""
    step = 1e-4
    columns = []
    for i in range(len(at)):
        moved = at.copy()
        moved[i] += step
        columns.append((function(moved) - value) / step)
    return np.stack(columns, axis=1)
