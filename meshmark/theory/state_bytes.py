"""Bytes of a rank's model states by category, under ZeRO and offload."""

from __future__ import annotations

import numpy as np

from meshmark.spec.layout import Offload
from meshmark.theory.grid import OFFLOADS, Column, Grid
from meshmark.theory.recipe import TrainingRecipe


def state_bytes(
    num_parameters: Column, grid: Grid, recipe: TrainingRecipe, ranks: Column | None = None
) -> dict[str, Column]:
    """Return the model states under ZeRO (arXiv:1910.02054 sec. 5).

    Stage 1 divides optimizer states and masters by dp, stage 2 also gradients, and stage 3 also weights. `ranks` are
    those that shards are divided over, if not all data-parallel ones. `updated` is what exists in the update alone.
    """
    shards = (grid.shards if ranks is None else ranks).astype(float) / recipe.replicas

    def share(num_bytes: float, from_stage: int) -> Column:
        return num_bytes * num_parameters / np.where(grid.zero_stage >= from_stage, shards, 1)

    masters, moments = share(recipe.states.master_bytes, 1), share(recipe.states.moment_bytes, 1)
    there = grid.offload == OFFLOADS.index(Offload.NONE)
    replicated = (shards > 1) & (grid.zero_stage < 3)
    return {
        "parameters": share(recipe.states.weight_bytes, 3) + np.where(there, masters, 0.0),
        "gradients": share(recipe.states.gradient_bytes, recipe.states.gradient_stage),
        "updated": np.where(there, share(recipe.states.shard_gradient_bytes, 1), 0.0),
        "optimizer": np.where(there, moments, 0.0),
        "host_bytes": np.where(there, 0.0, masters + moments + share(recipe.states.shard_gradient_bytes, 1)),
        "buffers": np.where(replicated, recipe.buffers.bucket_bytes * num_parameters, 0.0),
    }
