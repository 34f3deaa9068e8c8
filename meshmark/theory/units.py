"""Peak memory of FSDP's backward pass (FSDP2's and FairScale's). Its units are the blocks, and the root with all else.

Weights are gathered for a unit and for the next one, and its gradients are whole until they are reduced. The root is
gathered all through the backward pass, and its gradients stay until the end. A rank that is alone copies a unit's
weights when they are needed, and its gradients into one tensor and from there into another; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshmark.theory.backward_pass import Pass
from meshmark.theory.grid import Column, Grid
from meshmark.theory.parameter_order import parameter_sizes
from meshmark.theory.recipe import TrainingRecipe


@dataclass(frozen=True, kw_only=True)
class _Units:
    """Sizes of one stage's micro-batch, in elements and bytes."""

    one: Pass
    recipe: TrainingRecipe
    shards: Column
    root: Column
    """Elements outside all blocks."""
    later: bool
    """True if shards of gradients from earlier micro-batches exist."""

    @property
    def low(self) -> float:
        return self.recipe.wire.gather_bytes

    @property
    def wide(self) -> float:
        return self.recipe.wire.reduce_bytes

    @property
    def block(self) -> Column:
        """Elements of a block."""
        return self.one.block_parameters

    @property
    def gathered_root(self) -> Column:
        """Bytes of the gathered root.

        Zero for a root that is kept, because it is part of what the forward pass keeps.
        """
        return self.low * self.root * (not self.recipe.backward.keeps_root)

    @property
    def gathered(self) -> Column:
        """Bytes of a block's weights, without what is kept from the forward pass."""
        return self.low * self.block - self.one.kept_weights

    @property
    def ahead(self) -> Column:
        """Bytes of the block gathered ahead. A kept part is freed when the block is used, not before."""
        backward = self.recipe.backward
        gathers = backward.prefetches and backward.kept_share < 1
        return self.low * self.block * gathers * (self.shards > 1)

    def waiting(self, blocks: int) -> Column:
        """Return the bytes of gradients in reduction, of the last of `blocks`, which stay until the next unit's."""
        kept = min(blocks, self.recipe.backward.num_reductions)
        return kept * self.wide * self.block * self.recipe.backward.prefetches

    def waiting_beside(self, blocks: int) -> Column:
        """Return the bytes of them that are left when the next unit's reduction begins, after `blocks`."""
        return self.waiting(min(blocks, self.recipe.backward.num_reductions - 1))

    def reduced(self, blocks: float) -> Column:
        """Return the bytes of this rank's part of reduced blocks, without what exists anyway."""
        return (0.0 if self.later else blocks) * self.recipe.states.gradient_bytes * self.block / self.shards

    def reducing(self, elements: Column, last: Column) -> Column:
        """Return the bytes of a unit's gradients when its weights are freed. Its last gradient has `last` elements.

        FSDP2 holds the tensor that they were copied into; and between ranks gloo's copy, and the last copied gradient,
        through a loop variable (`foreach_reduce` of PyTorch's fsdp/_fully_shard/_fsdp_collectives.py). FairScale holds
        their flat tensor, its wide copy, a bucket, and gloo's copy of that.
        """
        part = self.wide * elements / self.shards
        if self.recipe.backward.prefetches:
            sent = np.where(self.shards > 1, self.low * last + self.wide * elements, 0.0)
            return self.wide * elements + sent + part
        return (self.low if self.wide > self.low else 0.0) * elements + 3 * self.wide * elements + part


def units_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    shards = grid.dp * grid.cp / recipe.replicas
    root = num_parameters - one.stage.num_layers * one.block_parameters
    units = _Units(one=one, recipe=recipe, shards=shards, root=root, later=later)
    # When the root is gathered, a copy of it is made; then one of the first block's weights, ahead. The copies in a
    # narrower dtype that a rank makes alone are less than the head's gradient, which follows.
    copies = np.where(shards > 1, np.maximum(units.gathered_root, 2 * units.ahead), 0.0)
    found = [one.loss(recipe.backward.loss_tensors).activations, one.held + units.gathered_root + copies]
    found.append(one.head().activations + units.gathered_root + units.low * one.head_parameters + units.ahead)
    found += [instant for done in one.landmarks for instant in _of_block(units, done)]
    found += _of_root(units)
    most: Column = np.max(found, axis=0)
    return most + (recipe.states.gradient_bytes * num_parameters / shards if later else 0.0)


def _of_block(units: _Units, done: int) -> Iterator[Column]:
    """Yield the bytes during the block after `done` others."""
    one, low, prefetches = units.one, units.low, units.recipe.backward.prefetches
    following = units.ahead if done < one.stage.num_layers - 1 else 0.0
    beside = units.gathered_root + low * one.head_parameters + units.reduced(done)
    start, queued = one.before_block(done) + one.stream + beside + following, units.waiting(done)
    yield start + units.gathered + (following if prefetches else units.gathered) + queued
    for i in one.in_block(done):
        made = i.made - one.head_parameters - done * units.block
        yield i.activations + beside + following + units.gathered + low * made + queued
    reducing = units.reducing(units.block, _last_of(one)[0]) + units.waiting_beside(done)
    yield start - one.block - one.kept_weights + reducing


def _of_root(units: _Units) -> Iterator[Column]:
    """Yield the bytes when the embedding's gradient is made, and when all gradients of the root are reduced."""
    one, root, layers = units.one, units.low * units.root, units.one.stage.num_layers
    end = one.before_block(layers) + units.reduced(layers)
    gathered, tied = units.gathered_root + root + units.waiting(layers), units.low * one.tied_parameters
    yield end + one.stream + gathered + tied
    yield end + gathered + 2 * tied  # the head's, the embedding's and their sum
    kept = root - units.gathered_root  # given up before it is reduced
    yield end - kept + units.reducing(units.root, _last_of(one)[1]) + units.waiting_beside(layers)


def _last_of(one: Pass) -> tuple[Column, Column]:
    """Return the elements of the last parameter of a block, and of the root."""
    embedding, block, head = parameter_sizes(one.model, one.stage, one.tp)
    none = [0.0 * one.tp]
    return (block or none)[-1], (head or embedding or none)[-1]
