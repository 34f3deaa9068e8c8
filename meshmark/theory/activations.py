"""Bytes that forward passes keep for the backward pass."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshmark.spec.layout import Recompute, Schedule
from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.theory.grid import RECOMPUTES, SCHEDULES, Column, Grid
from meshmark.theory.parameters import stage_parameters
from meshmark.theory.partition import Stage
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.saved_activations import (
    INDEX_BYTES,
    RNG_STATE_BYTES,
    block_bytes,
    cast_weight_bytes,
    head_bytes,
)


def tokens(model: ModelSpec, grid: Grid) -> Column:
    """Return the tokens of one micro-batch on one rank."""
    return grid.micro_batch * model.seq_len / grid.cp


def layer_activation_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes that one layer keeps for one micro-batch.

    GPT: arXiv:2205.05198 table 2, s b h (10 + 24/t + 5as/ht), all divided by t with sequence parallelism. Without
    dropout masks the 34 are 32 and the 5 are 4. Flash attention, like selective recomputation, keeps 4a/h instead of
    the scores. LLaMA: four tensors of h between the parallel regions, q, k, v and the output, and four of f (three if
    fused). For eager kernels, see `saved_activations.py`.
    """
    t, h, s = grid.tp.astype(float), model.hidden, model.seq_len / grid.cp
    width = recipe.activations.element_bytes
    if recipe.eager:
        kept = block_bytes(model, recipe.eager, t, sequence_shards(grid))
        stream = recipe.eager.stream * h / sequence_shards(grid)
        return tokens(model, grid) * np.where(grid.recompute == RECOMPUTES.index(Recompute.FULL), stream, kept)
    if model.family == "gpt":
        between, inside = (10.0, 24.0) if recipe.activations.dropout_masks else (8.0, 24.0)
        scores = 5.0 if recipe.activations.dropout_masks else 4.0
        between, inside = between * width / 2.0 * h, inside * width / 2.0 * h
    else:
        between = 4.0 * width * h
        # A fused gate keeps its two inputs, and the product after it its own: SwiGLUFunction of Megatron-LM's
        # core/fusions/fused_bias_swiglu.py.
        gated = 3.0 if recipe.activations.fused_elementwise else 4.0
        inside = width * (2.0 * model.query_hidden + 2.0 * model.kv_hidden + gated * model.active_ffn)
        # Tokens as experts get them, and what the experts make of them, which their weights' gradient needs.
        inside += width * 2.0 * model.dispatched * h
        scores = 4.0
    if recipe.products and recipe.activations.fused_elementwise:
        # Transformer Engine keeps the inputs of products as it casts them: the outputs of both norms, the input of the
        # second feed-forward product, and one more of attention's output, which attention keeps in 16 bits.
        saved = width - recipe.products.num_bytes
        between -= 2.0 * saved * h
        inside += recipe.products.num_bytes * h - saved * model.active_ffn
    core = np.where(_keeps_scores(grid, recipe), scores * width / 2.0 * model.num_heads * s, 4.0 * model.num_heads)
    per_token = between / np.where(grid.sequence_parallel, t, 1.0) + (inside + core) / t
    if recipe.activations.flash_attention:
        products = 3.0 * h + 2.0 * model.kv_hidden + 2.0 * model.active_ffn
        some = width * (h / np.where(grid.sequence_parallel, t, 1.0) + (h + 0.5 * products) / t)
        per_token = np.where(grid.recompute == RECOMPUTES.index(Recompute.SELECTIVE), some, per_token)
    full = width * h / np.where(grid.sequence_parallel, t, 1.0)
    return tokens(model, grid) * np.where(grid.recompute == RECOMPUTES.index(Recompute.FULL), full, per_token)


def _keeps_scores(grid: Grid, recipe: TrainingRecipe) -> Column:
    keeps: Column = (grid.recompute == RECOMPUTES.index(Recompute.NONE)) & (not recipe.activations.flash_attention)
    return keeps


def held_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage, index: int) -> Column:
    """Return the bytes that the forward passes of all micro-batches in flight keep for the backward pass.

    For eager kernels this includes the embedding's positions and the head's norm and log-softmax. The input of a later
    stage lies in its receive buffer and counts there.
    """
    flight = num_in_flight(grid, index)
    if recipe.eager is None:
        passes = flight / grid.virtual_stages
        held: Column = passes * stage.num_layers * layer_activation_bytes(model, grid, recipe)
        held = held + np.ceil(passes) * boundary_bytes(model, grid, recipe)
        return held
    return passes_in_flight_bytes(model, grid, recipe, index, flight)


def passes_in_flight_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, index: int, flight: Column) -> Column:
    """Return the bytes that `flight` forward passes of eager kernels leave on a rank.

    The passes are divided among its chunks in interleaved order.
    """
    stage = recipe.cut.stages(model, int(grid.pp[0]))[index]
    held = np.zeros(len(grid))
    for chunks in np.unique(grid.virtual_stages):
        rows = np.nonzero(grid.virtual_stages == chunks)[0]
        part, cut = grid.take(rows), recipe.cut.stages(model, int(grid.pp[0] * chunks)) if chunks > 1 else ()
        for chunk in range(chunks):
            own = cut[chunk * int(grid.pp[0]) + index] if cut else stage
            held[rows] += passes_bytes(model, part, recipe, own, chunk_in_flight(part, flight[rows], chunk))
    return held


def passes_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage, passes: Column) -> Column:
    """Return the bytes that `passes` forward passes of eager kernels through `stage` keep."""
    layer, widths, sp = layer_activation_bytes(model, grid, recipe), recipe.eager, sequence_shards(grid)
    assert widths is not None
    again = grid.recompute == RECOMPUTES.index(Recompute.FULL)
    more = np.where(again, float(stage.num_layers * RNG_STATE_BYTES), 0.0)
    if stage.has_head:
        more = more + tokens(model, grid) * head_bytes(model, widths, vocabulary_shards(grid, recipe), sp)
    if not stage.has_embedding:
        more = more - tokens(model, grid) * widths.stream * model.hidden / sp
    elif model.family is Family.GPT:
        more = more + INDEX_BYTES * model.seq_len / grid.cp
    if recipe.backward.keeps_root:
        root = stage_parameters(model, dataclasses.replace(stage, num_layers=0), grid.tp)
        more = more + np.where(grid.dp * grid.cp > 1, recipe.wire.gather_bytes * root, 0.0)
    more = more + stage.num_layers * kept_weight_bytes(model, grid, recipe)
    if widths.autocast:
        more = more + cast_weight_bytes(model, stage.num_layers, stage.has_head) / grid.tp
    found: Column = passes * stage.num_layers * layer + passes * more
    return found


def kept_weight_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes of a block's gathered weights that are kept from its forward to its backward pass."""
    gathered = recipe.wire.gather_bytes * model.block_parameters / grid.tp
    kept: Column = np.where(grid.dp * grid.cp > recipe.replicas, recipe.backward.kept_share * gathered, 0.0)
    return kept


def sequence_shards(grid: Grid) -> Column:
    """Return the number of ranks that a sequence is split over between tensor-parallel regions."""
    shards: Column = np.where(grid.sequence_parallel, grid.tp, 1)
    return shards


def vocabulary_shards(grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the number of ranks that the vocabulary is split over at the loss."""
    return np.ones_like(grid.tp) if recipe.whole_logits else grid.tp


def boundary_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes of a stage's input for one micro-batch."""
    return (
        tokens(model, grid)
        * model.hidden
        * recipe.activations.element_bytes
        / np.where(grid.sequence_parallel, grid.tp, 1)
    )


def num_in_flight(grid: Grid, index: int) -> Column:
    """Return the number of forward passes, each of a chunk of layers, whose activations stage `index` holds at its
    peak.

    GPipe m; 1F1B and ZB-H1 p - i; interleaved 2(p - i - 1) + (v - 1)p + 1 chunks (arXiv:2104.04473, arXiv:2205.05198
    sec. 4.2.3: L(1 + (p-1)/(pv)) layers on the first stage).
    """
    m, v = grid.num_micro_batches, grid.virtual_stages
    one_f_one_b = np.minimum(grid.pp - index, m)
    interleaved = np.minimum(2 * (grid.pp - index - 1) + (v - 1) * grid.pp + 1, m * v)
    flight = np.where(grid.schedule == SCHEDULES.index(Schedule.GPIPE), m, one_f_one_b)
    return np.where(v > 1, interleaved, np.where(grid.pp > 1, flight, 1)).astype(float)


def chunk_in_flight(grid: Grid, flight: Column, chunk: Column | int) -> Column:
    """Return how many of `flight` forward passes belong to one of a rank's chunks.

    Micro-batches pass in groups of p through chunk after chunk (arXiv:2104.04473 sec. 2.2.2).
    """
    group, every = grid.pp, grid.pp * grid.virtual_stages
    found: Column = flight // every * group + np.clip(flight % every - chunk * group, 0, group)
    return found
