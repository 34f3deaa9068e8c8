"""Peak memory of a rank, by pipeline stage and category, in closed form.

Letters in the formulas: s sequence, b micro-batch, h hidden, a heads, f feed-forward width, t tensor-parallel degree,
p pipeline stages, m micro-batches, v virtual stages, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.layout import Offload, Recompute, Schedule
from meshmark.model_spec import ModelSpec
from meshmark.plan.grid import OFFLOADS, RECOMPUTES, SCHEDULES, Column, Grid
from meshmark.plan.partition import Stage, stages
from meshmark.plan.rates import Rates
from meshmark.plan.recipe import TrainingRecipe

CATEGORIES = (
    "parameters", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation", "overhead",
)  # fmt: skip
_OTHERS = ("host_bytes", "released")
# Launches of a pass outside of its layers (loss, messages), and of a backward pass, in those of a layer's forward pass.
_PASS_LAUNCHES, _BACKWARD_LAUNCHES = 1.7, 1.6
# How far the host gets ahead in a pipeline of no more micro-batches than stages, of what it does in a longer one.
_SHORT_PIPELINE = 1.0 / 3.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes at the peak of the fullest stage, one row a layout; categories add up to `total_bytes`."""

    parameters: Column
    gradients: Column
    optimizer: Column
    """Moments and master weights on the device."""
    activations: Column
    """What the backward pass needs of all micro-batches in flight."""
    logits: Column
    buffers: Column
    """DDP's buckets, ZeRO-3's gathered weights, tensor-parallel gathers, fresh gradients, working set of a block."""
    fragmentation: Column
    """What the caching allocator holds beyond live tensors, and memory that queued collectives still pin."""
    overhead: Column
    """The framework's own."""
    fullest_stage: Column
    host_bytes: Column
    """Optimizer states kept in host memory or on NVMe instead, of the stage that has most of them."""
    released: Column
    """What queued collectives would pin but the allocator takes back, by waiting, because it would not fit."""
    first_stage_bytes: Column
    """The same total of the first stage: what rank 0 reports."""

    @property
    def total_bytes(self) -> Column:
        return sum((getattr(self, name) for name in CATEGORIES), start=np.zeros(len(self.parameters)))


def memory(
    model: ModelSpec, grid: Grid, recipe: TrainingRecipe, rates: Rates, *,
    lag: Column | None = None, capacity_bytes: float = np.inf,
) -> Memory:  # fmt: skip
    """Peak memory of every layout.

    `lag` (0 to 1, one a row) is how far the host runs ahead of the device: tensors handed to a queued collective
    cannot be reused until it has run (torch's `record_stream`), so a host that is ahead pins more of them. Where they
    would not fit into `capacity_bytes` the allocator waits for the device, frees them and tries again: they then count
    as `released`.
    """
    parts = {name: np.zeros(len(grid)) for name in (*CATEGORIES, *_OTHERS, "fullest_stage", "first_stage_bytes")}
    ahead = np.ones(len(grid)) if lag is None else lag

    def fill(rows: Column, cut: Sequence[Stage], indices: Sequence[int]) -> Column:
        """Write the fullest of these stages for these rows; returns which fit one of them only by releasing."""
        sub = grid.take(rows)
        by_stage = [_stage_memory(model, sub, recipe, rates, cut, i, ahead[rows], capacity_bytes) for i in indices]
        totals = np.stack([sum(part[c] for c in CATEGORIES) for part in by_stage])
        fullest = totals.argmax(axis=0)
        columns = np.arange(len(rows))
        for name in (*CATEGORIES, *_OTHERS):
            parts[name][rows] = np.stack([part[name] for part in by_stage])[fullest, columns]
        parts["host_bytes"][rows] = np.stack([part["host_bytes"] for part in by_stage]).max(axis=0)
        parts["fullest_stage"][rows] = np.array(indices)[fullest]
        parts["first_stage_bytes"][rows] = totals[0]
        released = np.stack([part["released"] for part in by_stage])
        return np.asarray(np.any((released > 0) & (totals <= capacity_bytes), axis=0))

    for pp, rows in grid.by_pipeline():
        cut = stages(model, pp, balanced=recipe.balanced_stages, head_share=recipe.head_share)
        # Of equal stages the first holds the most: only micro-batches in flight differ, and fall from stage to stage.
        # Unless it fits by releasing what a later one can keep; then all are looked at.
        firsts = sorted({stage: i for i, stage in reversed(list(enumerate(cut)))}.values())
        tight = fill(rows, cut, firsts)
        if tight.any():
            fill(rows[tight], cut, range(pp))
    return Memory(**parts)


def _stage_memory(
    model: ModelSpec, grid: Grid, recipe: TrainingRecipe, rates: Rates, cut: Sequence[Stage], index: int, ahead: Column,
    capacity_bytes: float,
) -> dict[str, Column]:  # fmt: skip
    """Every category of one stage's rank."""
    stage = cut[index]
    num_parameters = stage_parameters(model, stage) / grid.tp
    states = state_bytes(num_parameters, grid, recipe)
    layer = layer_activation_bytes(model, grid, recipe)
    flight = num_in_flight(grid, index)
    layers_held = stage.num_layers * flight / grid.virtual_stages
    held = layers_held * layer + np.ceil(flight / grid.virtual_stages) * boundary_bytes(model, grid, recipe)
    logits = _logit_bytes(model, grid, recipe, stage)
    working = _working_bytes(model, grid, recipe, stage)
    # A peak of the backward pass at its start (all activations, the logits or a block's working set), and one at its
    # end (one micro-batch less, every fresh gradient); the larger counts, its excess over the activations as buffers.
    fresh = recipe.fresh_gradient_bytes * num_parameters
    start = held + np.maximum(logits, working)
    end = held * (1.0 - 1.0 / flight) + fresh
    extra = np.maximum(start, end) - held - logits
    pinned = _pinned_bytes(model, grid, recipe, rates, stage, ahead)
    peak = np.maximum(start, end)
    live = sum((states[c] for c in ("parameters", "gradients", "optimizer", "buffers")), start=peak)
    live = live + rates.fragmentation * peak + rates.overhead_bytes + recipe.flat_buffer_bytes
    released = np.where(live + pinned > capacity_bytes, pinned, 0.0)
    return {
        **states, "activations": held, "logits": logits,
        "buffers": states["buffers"] + np.maximum(extra, 0.0) + recipe.flat_buffer_bytes,
        "fragmentation": rates.fragmentation * peak + pinned - released,
        "overhead": np.full(len(grid), rates.overhead_bytes), "released": released,
    }  # fmt: skip


def stage_parameters(model: ModelSpec, stage: Stage) -> float:
    """Parameters of one stage; a tied weight is held by the first and by the last stage, once where they are one."""
    total = float(stage.num_layers * model.block_parameters)
    if stage.has_embedding:
        total += model.embedding_parameters
    if stage.has_head:
        total += model.head_parameters
        if model.tied_embeddings and not stage.has_embedding:
            total += model.vocab_size * model.hidden
    return total


def state_bytes(num_parameters: Column, grid: Grid, recipe: TrainingRecipe) -> dict[str, Column]:
    """Model states under ZeRO (arXiv:1910.02054 sec. 5): stage 1 divides optimizer states by dp, 2 also gradients,
    3 also weights; stage 3 gathers two blocks at a time (the one computed and the next)."""
    shards = (grid.dp * grid.cp).astype(float)
    held = recipe.master_bytes + recipe.moment_bytes + recipe.shard_gradient_bytes
    optimizer = held * num_parameters / np.where(grid.zero_stage >= 1, shards, 1)
    away = grid.offload != OFFLOADS.index(Offload.NONE)
    replicated = (shards > 1) & (grid.zero_stage < 3)
    return {
        "parameters": recipe.weight_bytes * num_parameters / np.where(grid.zero_stage >= 3, shards, 1),
        "gradients": recipe.gradient_bytes * num_parameters / np.where(grid.zero_stage >= 2, shards, 1),
        "optimizer": np.where(away, 0.0, optimizer),
        "host_bytes": np.where(away, optimizer, 0.0),
        "buffers": np.where(replicated, recipe.bucket_bytes * num_parameters, 0.0),
    }


def tokens(model: ModelSpec, grid: Grid) -> Column:
    """Tokens of one micro-batch on one rank."""
    return grid.micro_batch * model.seq_len / grid.cp


def layer_activation_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Bytes that one layer keeps of one micro-batch.

    GPT: arXiv:2205.05198 table 2, s b h (10 + 24/t + 5as/ht), all over t with sequence parallelism; without dropout
    masks the 34 are 31 and the 5 are 4; flash attention keeps 4a/h instead of the scores, and so does selective
    recomputation. LLaMA: four tensors of h between the parallel regions, q, k, v and the output, and four of f.
    """
    t, h, s = grid.tp.astype(float), model.hidden, model.seq_len / grid.cp
    width = recipe.element_bytes
    if model.family == "gpt":
        between, inside = (10.0, 24.0) if recipe.dropout_masks else (8.0, 23.0)
        scores = 5.0 if recipe.dropout_masks else 4.0
        between, inside = between * width / 2.0 * h, inside * width / 2.0 * h
    else:
        between = 4.0 * width * h
        inside = width * (2.0 * h + 2.0 * model.kv_hidden + 4.0 * model.ffn_hidden)
        scores = 4.0
    core = np.where(_keeps_scores(grid, recipe), scores * width / 2.0 * model.num_heads * s, 4.0 * model.num_heads)
    per_token = between / np.where(grid.sequence_parallel, t, 1.0) + (inside + core) / t
    if recipe.flash_attention:
        products = 3.0 * h + 2.0 * model.kv_hidden + 2.0 * model.ffn_hidden
        some = width * (h / np.where(grid.sequence_parallel, t, 1.0) + (h + 0.5 * products) / t)
        per_token = np.where(grid.recompute == RECOMPUTES.index(Recompute.SELECTIVE), some, per_token)
    full = width * h / np.where(grid.sequence_parallel, t, 1.0)
    return tokens(model, grid) * np.where(grid.recompute == RECOMPUTES.index(Recompute.FULL), full, per_token)


def _keeps_scores(grid: Grid, recipe: TrainingRecipe) -> Column:
    keeps: Column = (grid.recompute == RECOMPUTES.index(Recompute.NONE)) & (not recipe.flash_attention)
    return keeps


def boundary_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """A stage's input for one micro-batch."""
    return tokens(model, grid) * model.hidden * recipe.element_bytes / np.where(grid.sequence_parallel, grid.tp, 1)


def num_in_flight(grid: Grid, index: int) -> Column:
    """Forward passes, of a chunk of layers each, whose activations stage `index` holds at its peak.

    GPipe m; 1F1B and ZB-H1 p - i; interleaved 2(p - i - 1) + (v - 1)p + 1 chunks (arXiv:2104.04473, arXiv:2205.05198
    sec. 4.2.3: L(1 + (p-1)/(pv)) layers on the first stage).
    """
    m, v = grid.num_micro_batches, grid.virtual_stages
    one_f_one_b = np.minimum(grid.pp - index, m)
    interleaved = np.minimum(2 * (grid.pp - index - 1) + (v - 1) * grid.pp + 1, m * v)
    flight = np.where(grid.schedule == SCHEDULES.index(Schedule.GPIPE), m, one_f_one_b)
    return np.where(v > 1, interleaved, np.where(grid.pp > 1, flight, 1)).astype(float)


def _logit_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage) -> Column:
    """Logits at the loss, divided over the tensor-parallel ranks by vocabulary; where the loss is elsewhere, those
    that are sent there and their gradient."""
    kept = np.where(grid.num_micro_batches > 1, recipe.kept_logit_bytes, 0.0)
    per_logit = recipe.logit_bytes + kept if stage.has_loss else (2 * recipe.element_bytes if stage.has_head else 0.0)
    return per_logit * tokens(model, grid) * model.vocab_size / grid.tp


def _working_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage) -> Column:
    """What the backward pass of a block needs beyond its saved tensors, and the gathered inputs and weights."""
    t, width, num_tokens = grid.tp, recipe.element_bytes, tokens(model, grid)
    whole = num_tokens * model.hidden * width
    block = 3.0 * num_tokens * model.ffn_hidden * width / t + whole * np.where(t > 1, 4.0, 1.0)
    # A neighbour's keys, values and their gradients, on their way around the ring (arXiv:2310.01889 sec. 3).
    block = block + np.where(grid.cp > 1, 4.0 * num_tokens * model.kv_hidden * width / t, 0.0)
    again = np.where(
        grid.recompute == RECOMPUTES.index(Recompute.NONE),
        0.0,
        layer_activation_bytes(model, _without_recompute(grid), recipe),
    )
    shards = (grid.dp * grid.cp).astype(float)
    largest = max(2 * model.block_parameters, model.vocab_size * model.hidden)
    gathered = np.where(
        (grid.zero_stage >= 3) & (shards > 1),
        (recipe.gather_bytes + recipe.reduce_bytes / 2.0) * largest / t,
        0.0,
    )
    return (block + again if stage.num_layers else np.zeros(len(grid))) + gathered


def _without_recompute(grid: Grid) -> Grid:
    columns = {name: getattr(grid, name) for name in grid.__dataclass_fields__}
    return Grid(**{**columns, "recompute": np.zeros_like(grid.recompute)})


def _pinned_bytes(
    model: ModelSpec, grid: Grid, recipe: TrainingRecipe, rates: Rates, stage: Stage, ahead: Column
) -> Column:
    """What queued tensor-parallel collectives still hold: two whole-sequence tensors a layer in either direction, each
    with a shard, no more than the launch queue is deep.

    Without a pipeline a backward pass's may follow a forward pass's in the queue. In one, a device slower than its
    host falls behind by the forward passes in flight, if there are more to come; any falls behind while the pipeline
    fills, since it waits to send: by all forward passes but its own and the one sent.
    """
    whole = tokens(model, grid) * model.hidden * recipe.element_bytes * (1.0 + 1.0 / grid.tp)
    m, n, pp = grid.num_micro_batches, float(stage.num_layers), grid.pp
    fit = rates.queued_collectives / 2.0
    deep = 2.0 * np.minimum(n, fit) + 2.0 * max(fit - n - _PASS_LAUNCHES, 0.0) / _BACKWARD_LAUNCHES
    alone = np.minimum(deep, 2.0 * n * (np.minimum(ahead / 0.3, 1.0) + ahead * (m - 1)))
    deep = 2.0 * fit * n / (n + _PASS_LAUNCHES)
    behind = ahead * np.where(m > pp, 1.0, _SHORT_PIPELINE) * 2.0 * n * np.minimum(pp, m)
    filling = np.where(ahead > 0.0, 2.0 * n * np.maximum(np.minimum(pp, m) - 2, 0), 0.0)
    piped = np.minimum(deep, np.maximum(behind, filling))
    return np.where(grid.tp > 1, np.where(pp > 1, piped, alone) * whole, 0.0)
