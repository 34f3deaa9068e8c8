"""Time that pipeline messages add to the stages' time, and how far the host runs ahead."""

from __future__ import annotations

import numpy as np

from meshmark.plan.rates import Rates
from meshmark.theory.grid import Column, Grid


def waits_for_messages(grid: Grid, rates: Rates, gpus_per_node: int) -> Column:
    """Return which pipelines poll for their messages."""
    early = (grid.dp < rates.polling.pipeline_wait_dp) | (grid.zero_stage == 0)
    large = grid.num_gpus >= rates.polling.pipeline_wait_nodes * gpus_per_node * np.where(early, 2, 1)
    waits: Column = (grid.pp > 1) & (large | (grid.tp >= rates.polling.pipeline_wait_tp))
    return waits


def message_wait_seconds(grid: Grid, rates: Rates) -> Column:
    """Return the sleep per step: once per neighbour and micro-batch, and while the pipeline fills and drains.

    Messages overtake one another while it fills, so a stage then sleeps for two thirds of a message.
    """
    neighbours = np.minimum(grid.pp - 1, 2)
    filling = (2.0 / 3.0) * np.maximum(grid.pp - 2, 0)
    seconds: Column = rates.polling.pipeline_wait_seconds * (neighbours * grid.num_micro_batches + filling)
    return seconds


def host_lag(grid: Grid, device: Column, floor: Column, gpus_per_node: int) -> Column:
    """Return how far the host gets ahead of its device, 0 to 1.

    Without a pipeline nothing holds the host back. In each micro-batch it gains the difference to the device if it is
    faster, and a little otherwise. In a pipeline, receiving a tensor's shape waits for the device each time. The host
    then gets ahead only if the device is the slower of the two, except for a little while the pipeline fills.
    """
    gained = np.clip(1.0 - floor / np.maximum(device, 1e-9), 0.05, 1.0)
    bound = np.clip((device / np.maximum(floor, 1e-9) - 0.7) / 0.3, 0.01, 1.0)
    return np.where(grid.pp == 1, gained, np.where(grid.tp <= gpus_per_node, bound, 0.01))
