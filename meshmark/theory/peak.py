"""Peak memory of an eager run in one step: at the loss, within the backward pass, or in the update.

What is alive besides activations depends on how a framework brings gradients from the backward pass to the update. It
also depends on gloo, whose all-gathers and reduce-scatters copy the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.theory.backward_pass import Pass
from meshmark.theory.flat_units import flat_units_peak
from meshmark.theory.gradient_path import GradientPath
from meshmark.theory.grid import Column, Grid
from meshmark.theory.model_theory import bucket_elements
from meshmark.theory.parameter_order import filled_elements, largest_temporaries, part_elements
from meshmark.theory.pipeline_order import Backward
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.streamed import streamed_peak, streamed_update_peak
from meshmark.theory.units import units_peak
from meshmark.theory.update_form import UpdateForm


def eager_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column) -> Column:
    """Return the peak of a backward pass without a pipeline, beyond parameters, masters and moments.

    With several micro-batches the last one counts, because gradients already exist then.
    """
    peaks = _DEEPSPEED.get(recipe.backward.gradient_path, _sharded_peak)
    first, later = (peaks(one, grid, recipe, num_parameters, later) for later in (False, True))
    found: Column = np.where(grid.num_micro_batches > 1, later, first)
    return found


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One of a pipeline rank's chunks of the model, by its sizes."""

    one: Pass
    num_parameters: Column
    gradients: Column
    """Bytes of the gradients that are held for the update."""


def pipeline_peak(
    chunks: Sequence[Chunk], passes: Sequence[Backward], grid: Grid, recipe: TrainingRecipe, message: Column
) -> Column:
    """Return the peak of a pipeline's rank over its backward passes.

    Each adds the forward passes that wait, other chunks' gradients, and sent messages of `message` bytes each.
    """
    peaks = _DEEPSPEED.get(recipe.backward.gradient_path, _sharded_peak)
    by_chunk = [
        [peaks(c.one, grid, recipe, c.num_parameters, later) - c.one.held for later in (False, True)] for c in chunks
    ]
    found = list[Column]()
    for at in passes:
        most = by_chunk[at.chunk][at.begun[at.chunk]] + (at.outputs + at.gradients) * message
        for i, (num_passes, begun, chunk) in enumerate(zip(at.passes, at.begun, chunks, strict=True)):
            most = most + num_passes * chunk.one.held + (chunk.gradients if begun and i != at.chunk else 0.0)
        found.append(most)
    return _most(found)


def _most(found: Sequence[Column]) -> Column:
    """Return the maximum, row by row."""
    most: Column = np.max(found, axis=0)
    return most


def update_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column) -> Column:
    """Return the bytes of gradients and AdamW's temporaries, by the form of its step.

    DeepSpeed passes one flat tensor, and the root of the second moments and its quotient are as large as it.
    """
    path, width = recipe.backward.gradient_path, recipe.states.gradient_bytes
    if path is GradientPath.STREAMED:
        return streamed_update_peak(one, grid, recipe, num_parameters)
    shards = np.where(grid.zero_stage >= recipe.states.gradient_stage, grid.dp * grid.cp / recipe.replicas, 1)
    held = width * num_parameters / shards
    flat = held * (3 if recipe.states.moment_bytes else 1)
    if path is GradientPath.STAGED:
        return flat
    if path is GradientPath.MODULES:
        return held + flat + width * bucket_elements(one.model)  # the flat tensor is a copy
    own = np.where(grid.zero_stage >= 3, shards, 1)  # below stage 3 an owner has whole tensors (FairScale's OSS)
    temporaries = {
        UpdateForm.LOOP: largest_temporaries(one.model, one.stage, one.tp) / own,
        UpdateForm.FOREACH: num_parameters / own,
        UpdateForm.FUSED: 0.0 * num_parameters,
    }
    return held + (width if recipe.states.moment_bytes else 0.0) * temporaries[recipe.update]


def _whole_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak with whole gradients or with buckets, which exist from the start of the step.

    With DDP, gradients of earlier micro-batches lie next to the buckets, each until it is copied to its bucket.
    """
    width, buckets = recipe.states.gradient_bytes, recipe.backward.gradient_path is GradientPath.BUCKETS
    unreduced = np.where(grid.pp == 1, buckets and later and recipe.backward.accumulates_outside_buckets, 0)
    found = list[Column]()
    for instant in one.instants(recipe.backward.loss_tensors):
        fresh = instant.num_parameters + instant.waiting
        beside = unreduced * (num_parameters - (instant.made - fresh))
        there = num_parameters + fresh + beside if later or buckets else instant.made
        found.append(instant.activations + width * there)
    return _most(found)


def _flattened_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of DeepSpeed without ZeRO: whole gradients, and at the end a flat copy of them."""
    flat = 2 * recipe.states.gradient_bytes * num_parameters
    return _most([_whole_peak(one, grid, recipe, num_parameters, later), flat])


def _staged_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of DeepSpeed's stage 1.

    The bucket exists next to whole gradients from the first gradient of the step on. When it is full for the first
    time, its gradients are freed and the rank's part is allocated.
    """
    width, bucket = recipe.states.gradient_bytes, bucket_elements(one.model)
    before = _most(
        [
            instant.activations
            + width
            * (
                num_parameters + instant.num_parameters + instant.waiting + bucket
                if later
                else instant.made + np.where(instant.made > 0, bucket, 0)
            )
            for instant in one.instants(recipe.backward.loss_tensors)
        ]
    )
    filled = filled_elements(one.model, one.stage, one.tp, bucket)
    part = part_elements(one.model, one.stage, one.tp, grid.dp, 0)
    return _most([before, width * (num_parameters + part + bucket - filled)])


def _modules_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of DeepSpeed's stage 3.

    A rank's gradients and the bucket are permanent. A module's weight is gathered when it is used. A full bucket is
    flattened once more and reduced.
    """
    width, bucket = recipe.states.gradient_bytes, bucket_elements(one.model)
    found = [one.loss(recipe.backward.loss_tensors).activations]
    for instant in [one.head(), *(i for done in one.landmarks for i in one.in_block(done))]:
        found.append(instant.activations + (width + recipe.wire.gather_bytes) * instant.num_parameters)
    found += [one.in_block(done)[-1].activations + recipe.wire.reduce_bytes * 2 * bucket for done in one.landmarks]
    return _most(found) + width * (num_parameters / grid.dp + bucket)


def _sharded_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of the gradient path. Sharded weights are gathered as FSDP does, whatever the path."""
    flat = recipe.backward.gradient_path is GradientPath.FLAT_UNITS
    peaks = (_whole_peak, flat_units_peak if flat else units_peak)
    whole, units = (peak(one, grid, recipe, num_parameters, later) for peak in peaks)
    found: Column = np.where(grid.zero_stage >= 3, units, whole)
    return found


_DEEPSPEED: dict[GradientPath, Callable[[Pass, Grid, TrainingRecipe, Column, bool], Column]] = {
    GradientPath.FLATTENED: _flattened_peak,
    GradientPath.STAGED: _staged_peak,
    GradientPath.STREAMED: streamed_peak,
    GradientPath.MODULES: _modules_peak,
}
