"""Peak memory of a rank, by pipeline stage and category, in closed form.

Letters in the formulas: s sequence, b micro-batch, h hidden, a heads, f feed-forward width, t tensor-parallel degree,
p pipeline stages, m micro-batches, v virtual stages, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.spec.layout import Recompute
from meshmark.spec.model_spec import ModelSpec
from meshmark.theory.activations import (
    boundary_bytes,
    held_bytes,
    layer_activation_bytes,
    module_bytes,
    num_in_flight,
    offloaded_bytes,
    repeats_core,
    tokens,
    vocabulary_shards,
    without_recompute,
)
from meshmark.theory.dealt_rows import dealt_parameters
from meshmark.theory.flops import layer_matrix_parameters
from meshmark.theory.grid import Column, Grid
from meshmark.theory.overheads import Overheads
from meshmark.theory.parameter_order import optimizer_state_bytes
from meshmark.theory.parameters import stage_adapters, stage_experts, stage_parameters
from meshmark.theory.partition import Stage
from meshmark.theory.queued import queued_tensors
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.saved_activations import logit_bytes
from meshmark.theory.stage_peak import stage_peak
from meshmark.theory.state_bytes import state_bytes
from meshmark.theory.update_form import UpdateForm

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "fragmentation",
    "overhead",
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank, one row per layout, with every category at its maximum.

    The peak, `total_bytes`, is their sum minus what is `absent` at that time.
    """

    parameters: Column
    """Weights, and the master copies that the optimizer updates."""
    gradients: Column
    """Gradients between backward pass and update."""
    optimizer: Column
    """Optimizer moments."""
    activations: Column
    """Tensors that the backward pass needs from all micro-batches in flight."""
    logits: Column
    """Further tensors that the loss needs."""
    buffers: Column
    """DDP's buckets, ZeRO-3's gathered weights, tensor-parallel gathers, fresh gradients, working set of a block."""
    fragmentation: Column
    """Bytes that the caching allocator holds beyond live tensors, and memory that queued collectives still pin."""
    overhead: Column
    """Overhead of the framework itself."""
    absent: Column
    """Part of the above that is not there at the peak."""
    fullest_stage: Column
    """The pipeline stage that these bytes belong to."""
    host_bytes: Column
    """Moments, master weights and activations in host memory or on NVMe, on the stage that has most of them."""
    released: Column
    """Bytes that queued collectives would pin, but that the allocator takes back by waiting because they would not
    fit."""
    first_stage_bytes: Column
    """`total_bytes` of the first stage, as rank 0 reports it. NaN if only one stage was computed."""

    @property
    def total_bytes(self) -> Column:
        return sum((getattr(self, name) for name in CATEGORIES), start=-self.absent)


def memory(
    model: ModelSpec,
    grid: Grid,
    recipe: TrainingRecipe,
    overheads: Overheads,
    *,
    lag: Column | None = None,
    capacity_bytes: float = np.inf,
) -> Memory:
    """Return the peak memory of every layout, on its fullest stage.

    `lag` (0 to 1, one per row) is how far the host runs ahead of the device. Tensors in a queued collective cannot be
    reused until it has run (torch's `record_stream`), so a host that is ahead pins more of them. If they do not fit
    into `capacity_bytes`, the allocator waits for the device, frees them and tries again; they then count as
    `released`.
    """
    found = {field.name: np.zeros(len(grid)) for field in dataclasses.fields(Memory)}
    ahead = np.ones(len(grid)) if lag is None else lag

    def fill(rows: Column, indices: Sequence[int]) -> Column:
        """Store the fullest of these stages for these rows. Returns the rows where a stage fits only by releasing."""
        sub, columns = grid.take(rows), np.arange(len(rows))
        room = Room(ahead=ahead[rows], capacity_bytes=capacity_bytes)
        by_stage = [stage_memory(model, sub, recipe, overheads, i, room) for i in indices]
        totals = np.stack([stage.total_bytes for stage in by_stage])
        fullest = totals.argmax(axis=0)
        for name, column in found.items():
            column[rows] = np.stack([getattr(stage, name) for stage in by_stage])[fullest, columns]
        found["host_bytes"][rows] = np.stack([stage.host_bytes for stage in by_stage]).max(axis=0)
        found["first_stage_bytes"][rows] = totals[0]
        released = np.stack([stage.released for stage in by_stage])
        return np.asarray(np.any((released > 0) & (totals <= capacity_bytes), axis=0))

    for pp, rows in grid.by_pipeline():
        cut = recipe.cut.stages(model, pp)
        # The first of several equal stages holds the most, because only micro-batches in flight differ, and these
        # decrease from stage to stage. If it fits only by releasing what a later one can keep, all are computed.
        firsts = sorted({stage: i for i, stage in reversed(list(enumerate(cut)))}.values())
        tight = fill(rows, firsts)
        if tight.any():
            fill(rows[tight], range(pp))
    return Memory(**found)


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much queued collectives would pin, and how much memory there is."""

    ahead: Column | float = 1.0
    """How far the host runs ahead of the device: `lag` of `memory`."""
    capacity_bytes: float = np.inf


_ENOUGH = Room()


def stage_memory(
    model: ModelSpec,
    grid: Grid,
    recipe: TrainingRecipe,
    overheads: Overheads,
    index: int,
    room: Room = _ENOUGH,
) -> Memory:
    """Return the memory of one stage's ranks, for layouts of one pipeline degree."""
    stage = recipe.cut.stages(model, int(grid.pp[0]))[index]
    num_parameters = stage_parameters(model, stage, grid.tp)
    stated = _stated(num_parameters, model, grid, recipe, stage)
    if recipe.adapter_rank:
        num_parameters = stage_adapters(model, stage, recipe.adapter_rank, grid.tp)
        linear = stated * _linear_share(model, stage)
        frozen = state_bytes(linear, grid, recipe.frozen(quantized=True))
        others = state_bytes(stated - linear, grid, recipe.frozen(quantized=False))
        trained = state_bytes(num_parameters, grid, recipe)
        states = {name: held + frozen[name] + others[name] for name, held in trained.items()}
    else:
        states = state_bytes(stated, grid, recipe)
    if model.expert_parameters:
        routed = state_bytes(stage_experts(model, stage, grid), grid, recipe, grid.expert_shards)
        states = {name: held + routed[name] for name, held in states.items()}
    updated = states.pop("updated")
    if own := recipe.states.matrix_wise:
        kept = optimizer_state_bytes(own.optimizer, model, stage, own.dtype)
        states["optimizer"] = kept / np.where(grid.zero_stage >= 1, grid.shards.astype(float), 1.0)
    held = held_bytes(model, grid, recipe, stage, index)
    if recipe.eager is None:
        states["host_bytes"] = states["host_bytes"] + offloaded_bytes(model, grid, recipe, stage, index)
    logits = _logit_bytes(model, grid, recipe, stage)
    if recipe.eager:
        peak = stage_peak(model, grid, recipe, stage, index) - states["gradients"]
        buffers = received_bytes(model, grid, recipe, int(index == 0) + (index == grid.pp - 1))
    else:
        # There is a peak at the start of the backward pass (all activations, the logits or a block's working set), one
        # at its end (one micro-batch less, every fresh gradient), and one in the update.
        fresh = recipe.buffers.fresh_gradient_bytes * num_parameters
        end = held * (1.0 - 1.0 / num_in_flight(grid, index)) + fresh
        peak = np.maximum(held + np.maximum(logits, _working_bytes(model, grid, recipe, stage)), end)
        roots = states["optimizer"] / 2 if recipe.update is UpdateForm.FOREACH else 0.0  # of AdamW's second moments
        peak = np.maximum(peak, roots + updated)
        buffers = states["buffers"] + recipe.buffers.flat_buffer_bytes
    # What the peak holds beyond categories at their fullest counts as buffers, what it lacks of them as absent.
    more = peak - held - logits
    whole = tokens(model, grid) * model.hidden * recipe.activations.element_bytes
    pinned = queued_tensors(grid, overheads, stage.num_layers, room.ahead) * whole * (1.0 + 1.0 / grid.tp)
    live = sum((states[c] for c in ("parameters", "gradients", "optimizer")), start=peak + buffers)
    live = live + overheads.overhead_bytes
    fragmentation = overheads.fragmentation * peak
    if recipe.buffers.expands_segments:
        fragmentation = np.clip(room.capacity_bytes - live, 0.0, fragmentation)
    live = live + fragmentation
    released = np.where(live + pinned > room.capacity_bytes, pinned, 0.0)
    return Memory(
        **{**states, "buffers": buffers + np.maximum(more, 0.0)},
        activations=held,
        logits=logits,
        absent=np.maximum(-more, 0.0),
        fragmentation=fragmentation + pinned - released,
        overhead=np.full(len(grid), overheads.overhead_bytes),
        released=released,
        fullest_stage=np.full(len(grid), index),
        first_stage_bytes=np.full(len(grid), np.nan),
    )


def _stated(num_parameters: Column, model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage) -> Column:
    """Return the parameters that would be planned if every shard were as full as the fullest."""
    shards = grid.shards.astype(float) / recipe.replicas
    if not recipe.deals_rows:
        return num_parameters
    return np.where(grid.zero_stage < 3, num_parameters, shards * dealt_parameters(model, stage, grid.tp, shards))


def _linear_share(model: ModelSpec, stage: Stage) -> float:
    """Return the share of a stage's parameters that belongs to the blocks' linear layers."""
    return stage.num_layers * layer_matrix_parameters(model) / float(stage_parameters(model, stage))


def received_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, ends: Column | int) -> Column:
    """Return the bytes of the buffers that PyTorch's pipeline receives messages into, for all micro-batches.

    They hold stage inputs and gradients of outputs, and are allocated once. `ends` counts the sides of a rank's stages
    that receive nothing.
    """
    m, v = grid.num_micro_batches, grid.virtual_stages
    found: Column = (2 * m * v - m * ends) * boundary_bytes(model, grid, recipe)
    return found


def _logit_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage) -> Column:
    """Return the bytes of logits at the loss, divided over the tensor-parallel ranks by vocabulary.

    If the loss is on another stage, these are the logits that are sent there and their gradient.
    """
    if recipe.eager:  # the gradients of the log-softmax and of the logits
        loss = 2.0 * tokens(model, grid) * logit_bytes(model, recipe.eager, vocabulary_shards(grid, recipe))
        return loss if stage.has_loss else np.zeros(len(grid))
    kept = np.where(grid.num_micro_batches > 1, recipe.activations.kept_logit_bytes, 0.0)
    per_logit = (
        recipe.activations.logit_bytes + kept
        if stage.has_loss
        else (2 * recipe.activations.element_bytes if stage.has_head else 0.0)
    )
    return per_logit * tokens(model, grid) * model.vocab_size / grid.tp


def _working_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage) -> Column:
    """Return what the backward pass of a block needs beyond its saved tensors, and the gathered inputs and weights."""
    t, width, num_tokens = grid.tp, recipe.activations.element_bytes, tokens(model, grid)
    whole = num_tokens * model.hidden * width
    block = 3.0 * num_tokens * model.active_ffn * width / t + whole * np.where(t > 1, 4.0, 1.0)
    # A neighbour's keys, values and their gradients, on their way around the ring (arXiv:2310.01889 sec. 3).
    block = block + np.where(grid.cp > 1, 4.0 * num_tokens * model.kv_hidden * width / t, 0.0)
    # A unit of layers, or the modules of one, as they are when their forward pass has been repeated.
    again = np.where(
        grid.recomputes(Recompute.NONE),
        0.0,
        layer_activation_bytes(model, without_recompute(grid), recipe) * grid.recompute_unit,
    )
    # Of the attention core that is its output: flash attention makes no scores.
    core = np.where(repeats_core(grid, recipe), width * model.query_hidden / t, 0.0)
    named = num_tokens * (module_bytes(model, grid, recipe) + core)
    modules = (grid.recompute_modules > 0) | repeats_core(grid, recipe)
    again = np.where(modules & recipe.activations.flash_attention, named, again)
    shards = grid.shards.astype(float)
    largest = max(2 * model.block_parameters, model.vocab_size * model.hidden)
    if recipe.frozen_bytes is not None:  # one matrix at a time is made of them, in 16 bits
        block = block + width * model.hidden * model.ffn_hidden / t
    gathered = np.where(
        (grid.zero_stage >= 3) & (shards > 1),
        (recipe.wire.gather_bytes + recipe.wire.reduce_bytes / 2.0) * largest / t,
        0.0,
    )
    return (block + again if stage.num_layers else np.zeros(len(grid))) + gathered
