"""The most that FSDP holds in its backward pass (FSDP2, FairScale's): its units are the blocks, and the root, which is
all else. Weights are gathered for a unit and for the one that comes next, and its gradients are whole until they are
reduced; those of the root, which is gathered all through the backward pass, until its end."""

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
    """Of one stage's micro-batch, elements and bytes."""

    one: Pass
    recipe: TrainingRecipe
    shards: Column
    root: Column
    """Elements in no block."""
    later: bool
    """Whether shards of gradients are there from micro-batches before."""

    @property
    def low(self) -> float:
        return self.recipe.wire.gather_bytes

    @property
    def wide(self) -> float:
        return self.recipe.wire.reduce_bytes

    @property
    def block(self) -> Column:
        """Elements."""
        return self.one.block_parameters

    @property
    def gathered_root(self) -> Column:
        """Bytes; of a root that is kept none, for it is among what the forward pass leaves."""
        return self.low * self.root * (not self.recipe.backward.keeps_root)

    @property
    def gathered(self) -> Column:
        """Bytes of a block's weights, net of what is there from the forward pass."""
        return self.low * self.block - self.one.kept_weights

    @property
    def ahead(self) -> Column:
        """Bytes of a block that comes next; a part that is kept makes way when the block is used, not before."""
        backward = self.recipe.backward
        return self.low * self.block * backward.prefetches * (backward.kept_share < 1)

    @property
    def waiting(self) -> Column:
        """Bytes of a block's gradients that are being reduced, until the next unit's are."""
        return self.wide * self.block * self.recipe.backward.prefetches

    def reduced(self, blocks: float) -> Column:
        """Bytes of this rank's part of so many blocks, but of what is there anyway."""
        return (0.0 if self.later else blocks) * self.recipe.states.gradient_bytes * self.block / self.shards

    def reducing(self, elements: Column, last: Column) -> Column:
        """Bytes of a unit's gradients, of which the last has `last` elements, when its weights are given up. FSDP2
        holds what they were copied into, gloo's copy, and still the last that was copied, by the variable of a loop
        (`foreach_reduce` of PyTorch's fsdp/_fully_shard/_fsdp_collectives.py); FairScale their flat tensor, its wide
        copy, a bucket, and gloo's copy of that."""
        part = self.wide * elements / self.shards
        if self.recipe.backward.prefetches:
            return self.low * last + 2 * self.wide * elements + part
        return (self.low if self.wide > self.low else 0.0) * elements + 3 * self.wide * elements + part


def units_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    shards = grid.dp * grid.cp / recipe.replicas
    root = num_parameters - one.stage.num_layers * one.block_parameters
    units = _Units(one=one, recipe=recipe, shards=shards, root=root, later=later)
    # When the root is gathered its copy is made; then the first block's, ahead.
    copies = np.maximum(units.gathered_root, 2 * units.ahead)
    found = [one.loss(recipe.backward.loss_tensors).activations, one.held + units.gathered_root + copies]
    found.append(one.head().activations + units.gathered_root + units.low * one.head_parameters + units.ahead)
    found += [instant for done in one.landmarks for instant in _of_block(units, done)]
    found += _of_root(units)
    most: Column = np.max(found, axis=0)
    return most + (recipe.states.gradient_bytes * num_parameters / shards if later else 0.0)


def _of_block(units: _Units, done: int) -> Iterator[Column]:
    """That after `done` others."""
    one, low, prefetches = units.one, units.low, units.recipe.backward.prefetches
    following = units.ahead if done < one.stage.num_layers - 1 else 0.0
    beside = units.gathered_root + low * one.head_parameters + units.reduced(done)
    start, queued = one.before_block(done) + one.stream + beside + following, units.waiting if done else 0.0
    yield start + units.gathered + (following if prefetches else units.gathered) + queued
    for i in one.in_block(done):
        made = i.made - one.head_parameters - done * units.block
        yield i.activations + beside + following + units.gathered + low * made + queued
    yield start - one.block - one.kept_weights + units.reducing(units.block, _last_of(one)[0])


def _of_root(units: _Units) -> Iterator[Column]:
    """When the embedding's gradient is made, and when all of the root are reduced."""
    one, root, layers = units.one, units.low * units.root, units.one.stage.num_layers
    end = one.before_block(layers) + units.reduced(layers)
    gathered, tied = units.gathered_root + root + units.waiting, units.low * one.tied_parameters
    yield end + one.stream + gathered + tied
    yield end + gathered + 2 * tied  # the head's, the embedding's and their sum
    kept = root - units.gathered_root  # given up before it is reduced
    yield end - kept + units.reducing(units.root, _last_of(one)[1])


def _last_of(one: Pass) -> tuple[Column, Column]:
    """Elements of the last parameter of a block, and of the root."""
    embedding, block, head = parameter_sizes(one.model, one.stage, one.tp)
    none = [0.0 * one.tp]
    return (block or none)[-1], (head or embedding or none)[-1]
