"""What a pipeline adds to its stages' time, in closed form: filling, draining, waiting, and the lead of its host."""

from __future__ import annotations

import numpy as np

from meshmark.plan.rates import Rates
from meshmark.spec.layout import Schedule
from meshmark.theory.grid import SCHEDULES, Column, Grid


def bubble_seconds(grid: Grid, totals: Column, pace: Column) -> Column:
    """Time beyond m times the slowest stage, from each stage's own account; `totals` is a row a stage.

    GPipe: every other stage once. 1F1B: stage i waits for the stages before it, at its start and at its end; for those
    after it, from its first forward to that one's backward, less the n = p - i - 1 forwards it does meanwhile, and
    again after its last forward, less n backwards. Interleaved: the same of chunks, a v-th each, with 2n meanwhile.
    Equal stages give the literature's (p - 1)/v (arXiv:2104.04473 sec. 2.2). ZB-H1 fills two thirds with weight
    gradients (arXiv:2401.10241 table 1). `schedule.simulate` is what this stays close to.
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


def waits_for_messages(grid: Grid, rates: Rates, gpus_per_node: int) -> Column:
    """Which pipelines poll for their messages."""
    early = (grid.dp < rates.polling.pipeline_wait_dp) | (grid.zero_stage == 0)
    large = grid.num_gpus >= rates.polling.pipeline_wait_nodes * gpus_per_node * np.where(early, 2, 1)
    waits: Column = (grid.pp > 1) & (large | (grid.tp >= rates.polling.pipeline_wait_tp))
    return waits


def message_wait_seconds(grid: Grid, rates: Rates) -> Column:
    """Sleep of a step: once per neighbour and micro-batch, and while the pipeline fills and drains.

    Messages overtake one another while it fills, so a stage then sleeps for two thirds of a message.
    """
    neighbours = np.minimum(grid.pp - 1, 2)
    filling = (2.0 / 3.0) * np.maximum(grid.pp - 2, 0)
    seconds: Column = rates.polling.pipeline_wait_seconds * (neighbours * grid.num_micro_batches + filling)
    return seconds


def host_lag(grid: Grid, device: Column, floor: Column, gpus_per_node: int) -> Column:
    """How far the host gets ahead of its device, 0 to 1.

    Without a pipeline nothing holds it: it gains on the device what it is faster in each micro-batch, and a little
    where it is not. In one, receiving a tensor's shape waits for the device each time, so it only gets ahead, but for
    a little while the pipeline fills, where the device is the slower of the two.
    """
    gained = np.clip(1.0 - floor / np.maximum(device, 1e-9), 0.05, 1.0)
    bound = np.clip((device / np.maximum(floor, 1e-9) - 0.7) / 0.3, 0.01, 1.0)
    return np.where(grid.pp == 1, gained, np.where(grid.tp <= gpus_per_node, bound, 0.01))
