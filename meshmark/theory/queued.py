"""Memory that queued collectives pin because the host runs ahead of the device."""

from __future__ import annotations

import numpy as np

from meshmark.theory.grid import Column, Grid
from meshmark.theory.overheads import Overheads

# Kernel launches of a pass outside its layers (loss, messages), and of a backward pass, relative to a layer's forward.
_PASS_LAUNCHES, _BACKWARD_LAUNCHES = 1.7, 1.6
# How far the host gets ahead in a pipeline with at most as many micro-batches as stages, relative to a longer one.
_SHORT_PIPELINE = 1.0 / 3.0


def queued_tensors(grid: Grid, overheads: Overheads, num_layers: int, ahead: Column | float) -> Column:
    """Return the whole-sequence tensors, each with a shard, that queued tensor-parallel collectives of a stage hold.

    There are two per layer and direction, limited by the depth of the launch queue. Without a pipeline, those of a
    backward pass may follow those of a forward pass in the queue. In a pipeline, a device slower than its host falls
    behind by the forward passes in flight, if more are to come. Any device falls behind while the pipeline fills,
    since it waits to send: by all forward passes but its own and the one sent.
    """
    m, n, pp = grid.num_micro_batches, float(num_layers), grid.pp
    fit = overheads.queued_collectives / 2.0
    deep = 2.0 * np.minimum(n, fit) + 2.0 * max(fit - n - _PASS_LAUNCHES, 0.0) / _BACKWARD_LAUNCHES
    alone = np.minimum(deep, 2.0 * n * (np.minimum(ahead / 0.3, 1.0) + ahead * (m - 1)))
    deep = 2.0 * fit * n / (n + _PASS_LAUNCHES)
    behind = ahead * np.where(m > pp, 1.0, _SHORT_PIPELINE) * 2.0 * n * np.minimum(pp, m)
    filling = np.where(ahead > 0.0, 2.0 * n * np.maximum(np.minimum(pp, m) - 2, 0), 0.0)
    piped = np.minimum(deep, np.maximum(behind, filling))
    return np.where(grid.tp > 1, np.where(pp > 1, piped, alone), 0.0)
