"""Time that a pipeline adds to its stages, in closed form: filling, draining and waiting."""

from __future__ import annotations

import functools

import numpy as np

from meshmark.spec.layout import Layout, Schedule
from meshmark.theory.grid import SCHEDULES, Column, Grid, layout_grid


def bubble_seconds(grid: Grid, totals: Column, pace: Column) -> Column:
    """Return the time beyond m times the slowest stage, from each stage's own total. `totals` has one row per stage.

    GPipe: every other stage once. 1F1B: stage i waits for the stages before it, at its start and at its end. It waits
    for those after it from its first forward to that one's backward, minus the n = p - i - 1 forwards it does
    meanwhile, and again after its last forward, minus n backwards. Interleaved: the same with chunks of a v-th each,
    and with 2n meanwhile. Equal stages give (p - 1)/v, as in the literature (arXiv:2104.04473 sec. 2.2). ZB-H1 fills
    two thirds with weight gradients (arXiv:2401.10241 table 1). The result approximates `meshmark.plan.simulator`.
    """
    num_stages, m, v = len(totals), grid.num_micro_batches, grid.virtual_stages
    ends = []
    for i, own in enumerate(totals):
        before, after = totals[:i].sum(axis=0), totals[i + 1 :].sum(axis=0)
        forwards = np.where(v > 1, 2, 1) * (num_stages - i - 1)
        meanwhile = np.minimum(forwards, m * v - (v - 1) * num_stages - 1)
        waits = np.maximum(after - meanwhile * own / 3.0, 0.0)
        again = np.maximum(after - meanwhile * own * 2.0 / 3.0, 0.0)
        # With so few micro-batches that all forwards come first, there is one wait alone.
        waits = waits + np.where(m * v > forwards + (v - 1) * num_stages, again, 0.0)
        ends.append(m * own + (before + waits) / v)
    one_f_one_b = np.max(ends, axis=0) - m * pace
    others = totals.sum(axis=0) - pace
    bubble = np.where(grid.schedule == SCHEDULES.index(Schedule.GPIPE), others, one_f_one_b)
    filled: Column = bubble * np.where(grid.schedule == SCHEDULES.index(Schedule.ZERO_BUBBLE), 1.0 / 3.0, 1.0)
    return filled


@functools.lru_cache(maxsize=1024)
def bubble_fraction(layout: Layout) -> float:
    """Return the idle share of a step with equal stages: (p - 1)/(vm + p - 1), with a third of the p - 1 under ZB-H1.

    See arXiv:1811.06965 and arXiv:2104.04473 sec. 2.2.
    """
    grid, one = layout_grid(layout, layout.dp * layout.num_micro_batches), np.ones(1)
    bubble = float(bubble_seconds(grid, np.ones((layout.pp, 1)), one)[0])
    return bubble / (layout.num_micro_batches + bubble)
