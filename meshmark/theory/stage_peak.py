"""Peak memory of one stage's rank in a step of eager kernels, with or without a pipeline."""

from __future__ import annotations

import numpy as np

from meshmark.spec.model_spec import ModelSpec
from meshmark.theory.activations import (
    boundary_bytes,
    kept_weight_bytes,
    passes_bytes,
    sequence_shards,
    tokens,
    vocabulary_shards,
)
from meshmark.theory.backward_pass import Pass
from meshmark.theory.grid import SCHEDULES, Column, Grid
from meshmark.theory.parameters import stage_parameters
from meshmark.theory.partition import Stage
from meshmark.theory.peak import Chunk, eager_peak, pipeline_peak, update_peak
from meshmark.theory.pipeline_order import backward_passes
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.state_bytes import state_bytes


def stage_peak(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage, index: int) -> Column:
    """Return the peak of eager kernels, in a backward pass or in the update."""
    whole, count = eager_pass(model, grid, recipe, stage), stage_parameters(model, stage, grid.tp)
    backward = _backward_peak(model, grid, recipe, stage, index)
    return np.maximum(update_peak(whole, grid, recipe, count), backward)


def update_excess(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, index: int) -> Column:
    """Return the bytes by which the update of eager kernels exceeds every backward pass, or zero."""
    stage = recipe.cut.stages(model, int(grid.pp[0]))[index]
    backward = _backward_peak(model, grid, recipe, stage, index)
    found: Column = stage_peak(model, grid, recipe, stage, index) - backward
    return found


def _backward_peak(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage, index: int) -> Column:
    """Return the peak of a backward pass of eager kernels beyond parameters, masters and moments.

    Includes the outputs and gradients that a pipeline has sent.
    """
    pp, count = int(grid.pp[0]), stage_parameters(model, stage, grid.tp)
    if pp == 1:
        return eager_peak(eager_pass(model, grid, recipe, stage), grid, recipe, count)
    found = np.zeros(len(grid))
    orders = np.stack([grid.schedule, grid.num_micro_batches, grid.virtual_stages])
    for schedule, m, v in np.unique(orders, axis=1).T:
        rows = np.nonzero((orders == [[schedule], [m], [v]]).all(axis=0))[0]
        part = grid.take(rows)
        cut = recipe.cut.stages(model, pp * int(v)) if v > 1 else ()
        owned = [cut[chunk * pp + index] for chunk in range(int(v))] if v > 1 else [stage]
        chunks = [
            Chunk(
                one=eager_pass(model, part, recipe, own),
                num_parameters=(count := stage_parameters(model, own, part.tp)),
                gradients=state_bytes(count, part, recipe)["gradients"],
            )
            for own in owned
        ]
        passes = backward_passes(SCHEDULES[schedule], pp, index, int(m), int(v))
        most = pipeline_peak(chunks, passes, part, recipe, boundary_bytes(model, part, recipe))
        found[rows] = most
    return found


def eager_pass(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage) -> Pass:
    """Return one micro-batch of eager kernels through `stage`."""
    assert recipe.eager is not None
    return Pass(
        model=model,
        widths=recipe.eager,
        stage=stage,
        tokens=tokens(model, grid),
        tp=grid.tp,
        sp=sequence_shards(grid),
        held=passes_bytes(model, grid, recipe, stage, np.ones(len(grid))),
        loss_tp=vocabulary_shards(grid, recipe),
        kept_weights=kept_weight_bytes(model, grid, recipe),
    )
