"""DeepSpeed's ZeRO stage 2, gradient by gradient, as in its runtime/zero/stage_1_and_2.py.

It gives the memory besides activations when each gradient arrives, when its bucket is full and reduced, and in the
update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshmark.theory.backward_pass import Pass
from meshmark.theory.grid import Column, Grid
from meshmark.theory.model_theory import bucket_elements
from meshmark.theory.operations import Parameter, moments, parameters
from meshmark.theory.recipe import TrainingRecipe

_MOST_RANKS = 16
"""Number of ranks among which the fullest is searched if no rank is given."""
_WIDE = 8
"""Bytes per element of the float64 copy that the norm is computed from."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Equal parts of even size of the flat sequence of parameters, by rank (rows) and layout (columns)."""

    rank: Column
    size: Column

    @classmethod
    def of(cls, grid: Grid, num_parameters: Column) -> Parts:
        """Return the parts of the given rank, or of all ranks that may be the fullest."""
        every = np.arange(min(int(grid.dp.max()), _MOST_RANKS) if (grid.dp_rank < 0).any() else 1)[:, None]
        rank, shards = np.where(grid.dp_rank >= 0, grid.dp_rank, np.minimum(every, grid.dp - 1)), grid.dp * grid.cp
        return cls(rank=rank, size=2 * np.ceil(num_parameters / (2 * shards)))

    def local_elements(self, parameter: Parameter) -> Column:
        """Return the elements of a parameter in a rank's part."""
        low, high = self.rank * self.size, (self.rank + 1) * self.size
        found: Column = np.maximum(np.minimum(parameter.stop, high) - np.maximum(parameter.start, low), 0)
        return found

    def first(self, parameter: Parameter) -> Column:
        """Return the part in which a parameter begins."""
        found: Column = parameter.start // self.size
        return found

    def last(self, parameter: Parameter) -> Column:
        found: Column = (parameter.stop - 1) // self.size
        return found

    def whole(self, every: Iterable[Parameter]) -> Column:
        """Return the elements of all parameters that overlap a rank's part."""
        found: Column = np.sum([one.size * (self.local_elements(one) > 0) for one in every], axis=0)
        return found


class Bucket:
    """The bucket that gradients are copied into until the next one would not fit.

    They are then reduced; gradients for the parts of several ranks are reduced in one flat copy. Gradients that
    overlap the rank's own part move to a tensor for all of these.
    """

    def __init__(self, capacity: int, parts: Parts, part: Column, number: int = 1) -> None:
        """`number` is how many such buckets are filled in turn."""
        self.capacity, self.parts, self.part, self.number = capacity, parts, part, number
        self.there, self.made = 0.0 * part, 0.0 * part
        """Elements of the bucket and of the part. They exist from the first gradient on, or from the first one in the
        part.
        """
        self.beside = 0.0 * part
        """Elements of a gradient too large for the bucket, which is reduced in place."""
        self.filled, self.owns = 0.0 * part, part < 0
        self.first, self.last = part + np.inf, part - np.inf

    @property
    def elements(self) -> Column:
        return self.there + self.made + self.beside

    def take(self, parameter: Parameter) -> Column:
        """Add an arriving gradient. Returns the most elements that exist meanwhile, without the gradient itself."""
        self.there = 0.0 * self.part + self.number * self.capacity
        most = self.reduce(self.filled + parameter.size > self.capacity)
        self.filled = self.filled + parameter.size
        self.beside = np.where(parameter.size > self.capacity, parameter.size, self.beside)
        self.owns = self.owns | (self.parts.local_elements(parameter) > 0)
        self.first = np.minimum(self.first, self.parts.first(parameter))
        self.last = np.maximum(self.last, self.parts.last(parameter))
        return most

    def reduce(self, full: Column) -> Column:
        """Reduce the bucket where it is `full`. Returns the most elements that exist meanwhile."""
        copied = self.elements + np.where(full & (self.first < self.last), self.filled, 0.0)
        self.made = np.where(full & self.owns, self.part, self.made)
        most: Column = np.maximum(copied, self.elements)
        self.beside, self.filled = np.where(full, 0.0, self.beside), np.where(full, 0.0, self.filled)
        self.owns = self.owns & ~full
        self.first, self.last = np.where(full, np.inf, self.first), np.where(full, -np.inf, self.last)
        return most


def streamed_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of the backward pass. `later`: the part from previous micro-batches exists too."""
    width, parts = recipe.states.gradient_bytes, Parts.of(grid, num_parameters)
    part = parts.whole(parameters(one).values())
    capacity = recipe.backward.bucket_elements or bucket_elements(one.model)
    bucket, found = Bucket(capacity, parts, part, recipe.backward.num_buckets), list[Column]()
    for moment in moments(one, recipe.backward.loss_tensors):
        fresh = sum((p.size for p in moment.parameters), start=0.0 * one.tp)
        found.append(moment.during + width * (bucket.elements + fresh))
        for parameter in moment.parameters:
            found.append(moment.after + width * (bucket.take(parameter) + fresh))
            fresh = fresh - parameter.size
    found.append(width * bucket.reduce(part >= 0))
    most: Column = np.max(np.max(found, axis=0) + width * part * later, axis=0)
    return most


def streamed_update_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column) -> Column:
    """Return the peak of the update.

    It is the largest of: the norm, computed in float64 of one gradient after another; the rank's flat part, next to
    the tensors that overlap it, and with AdamW's two temporaries; and the weights of all ranks, which gloo gathers in
    a copy.
    """
    width, every, parts = recipe.states.gradient_bytes, parameters(one).values(), Parts.of(grid, num_parameters)
    own = np.array([parts.local_elements(p) for p in every])
    part, flat = parts.whole(every), parts.size + 0.0 * parts.rank
    copied = np.where(own.max(axis=0) < flat, flat, 0.0)  # of one tensor alone, a view
    updating = 2 * flat * (recipe.states.moment_bytes > 0) + np.where(copied > 0, flat, part)
    found = [
        width * part + _WIDE * own.max(axis=0),
        width * (part + copied),
        width * updating,
        recipe.wire.gather_bytes * grid.dp * grid.cp * flat,
    ]
    most: Column = np.max(found, axis=(0, 1))
    return most
