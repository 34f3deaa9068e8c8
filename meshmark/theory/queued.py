"""What the host hands to the device ahead of time, and so keeps from being freed: queued collectives."""

from __future__ import annotations

import numpy as np

from meshmark.theory.grid import Column, Grid
from meshmark.theory.overheads import Overheads

# Launches of a pass outside of its layers (loss, messages), and of a backward pass, in those of a layer's forward pass.
_PASS_LAUNCHES, _BACKWARD_LAUNCHES = 1.7, 1.6
# How far the host gets ahead in a pipeline of no more micro-batches than stages, of what it does in a longer one.
_SHORT_PIPELINE = 1.0 / 3.0


def queued_tensors(grid: Grid, overheads: Overheads, num_layers: int, ahead: Column | float) -> Column:
    """Whole-sequence tensors that queued tensor-parallel collectives of a stage still hold, each with a shard: two a
    layer in either direction, no more than the launch queue is deep.

    Without a pipeline a backward pass's may follow a forward pass's in the queue. In one, a device slower than its
    host falls behind by the forward passes in flight, if there are more to come; any falls behind while the pipeline
    fills, since it waits to send: by all forward passes but its own and the one sent.
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
