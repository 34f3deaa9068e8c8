"""Peak memory of FSDP1's backward pass, whose units (blocks, and the root with all else) are one flat tensor each.

See `_pre_backward_hook` and `_post_backward_hook` of PyTorch's distributed/fsdp/_runtime_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.theory.backward_pass import Pass
from meshmark.theory.grid import Column, Grid
from meshmark.theory.recipe import TrainingRecipe


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """One unit, by its sizes in bytes."""

    low: Column
    """Bytes of the gathered weights, and of their gradients."""
    wide: Column
    """Bytes of the gradients in the dtype of the reduction."""
    widened: bool
    """True if these are two different tensors."""
    shards: Column

    @property
    def together(self) -> Column:
        """Bytes when all gradients are made: the gradients and their flat tensor."""
        return 2 * self.low

    @property
    def reduced(self) -> Column:
        """Bytes without the weights: the flat tensor, its wide copy, gloo's copy of that, and this rank's part."""
        return (self.low if self.widened else 0.0) + 2 * self.wide + self.wide / self.shards

    @property
    def gathering(self) -> Column:
        """Bytes of the weights, gloo's copy, and this rank's part if it is cast to a narrower dtype first."""
        return 2 * self.low + (self.low / self.shards if self.widened else 0.0)


def flat_units_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak in bytes of a backward pass with flat units.

    A block's weights are gathered while the previous one, in backward order, runs. The root's weights are there from
    the forward pass on. Unlike in FSDP2, reduced tensors do not stay until the next unit.
    """
    shards, last = grid.dp * grid.cp / recipe.replicas, one.stage.num_layers - 1
    unit, root = (
        _Flat(
            low=recipe.wire.gather_bytes * count,
            wide=recipe.wire.reduce_bytes * count,
            widened=recipe.wire.reduce_bytes > recipe.wire.gather_bytes,
            shards=shards,
        )
        for count in (one.block_parameters, num_parameters - one.stage.num_layers * one.block_parameters)
    )
    held = recipe.states.gradient_bytes * num_parameters / shards if later else 0.0
    ahead = recipe.backward.kept_share < 1  # weights that are kept are gathered no more
    gathered = unit.low - one.kept_weights
    beside = recipe.wire.gather_bytes * one.head_parameters
    found = [one.loss(recipe.backward.loss_tensors).activations, one.held + unit.gathering * ahead]
    found.append(one.head().activations + beside + unit.low * ahead)
    for done in one.landmarks:
        before = 0.0 if later else recipe.states.gradient_bytes * done * one.block_parameters / shards
        start, following = one.before_block(done) + one.stream + beside + before, ahead and done < last
        found.append(start + gathered + unit.gathering * following)
        for i in one.in_block(done):
            made = recipe.wire.gather_bytes * (i.made - one.head_parameters - done * one.block_parameters)
            found.append(i.activations + beside + before + gathered + made + unit.low * following)
        over = start - one.block + unit.low * following
        found += [over + gathered + unit.together, over - one.kept_weights + unit.reduced]
    end = one.before_block(one.stage.num_layers)
    blocks = 0.0 if later else recipe.states.gradient_bytes * one.stage.num_layers * one.block_parameters / shards
    tied = recipe.wire.gather_bytes * one.tied_parameters
    found.append(end + root.low + 2 * tied + blocks)  # the head's, the embedding's and their sum
    found += [end + root.together + blocks, end - root.low + root.reduced + blocks]
    most: Column = np.max(found, axis=0)
    return most + held
