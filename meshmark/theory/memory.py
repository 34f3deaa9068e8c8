"""Memory of a rank, by pipeline stage and category, in closed form.

`ModelStates` and `ExtraMemory` have the form in which the suites compare the plan with measurements. Peaks are those
of one stage's rank in a step of eager kernels, with or without a pipeline. Besides tensors, there are overheads of an
allocator and a framework, and memory that queued collectives pin because the host runs ahead of the device.

Letters in the formulas: s sequence, b micro-batch, h hidden, a heads, f feed-forward width, t tensor-parallel degree,
p pipeline stages, m micro-batches, v virtual stages, L layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshmark.models.transformer import ModelSpec
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule
from meshmark.theory.activations import (
    boundary_bytes,
    held_bytes,
    kept_weight_bytes,
    layer_activation_bytes,
    module_bytes,
    num_in_flight,
    offloaded_bytes,
    passes_bytes,
    repeats_core,
    sequence_shards,
    tokens,
    vocabulary_shards,
    without_recompute,
)
from meshmark.theory.backward_pass import Pass, logit_bytes
from meshmark.theory.grid import OFFLOADS, SCHEDULES, Column, Grid, layout_grid
from meshmark.theory.model_theory import (
    bucket_elements,
    layer_matrix_parameters,
    local_parameters,
    stage_adapters,
    stage_experts,
    stage_parameters,
    theory_of,
)
from meshmark.theory.partition import Stage, dealt_parameters, optimizer_state_bytes
from meshmark.theory.peak import Chunk, backward_passes, eager_peak, pipeline_peak, update_peak
from meshmark.theory.recipe import DEEPSPEED_PATHS, GradientPath, TrainingRecipe, UpdateForm, eager_recipe
from meshmark.theory.traffic import METERED_STEP

# --- Memory of an allocator and a framework beyond the tensors of a closed form.


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Memory that no tensor of the step accounts for.

    Zero by default, because tests measure exact bytes of tensors.
    """

    fragmentation: float = 0.0
    """Reserved but unused memory, as a share of activations and working set."""
    queued_collectives: float = 0.0
    """Whole-sequence tensors that queued collectives pin when the host is far ahead, all in forward passes."""
    overhead_bytes: float = 0.0
    """Memory that the framework takes before a model is built."""


# --- Memory that queued collectives pin because the host runs ahead of the device.

# Kernel launches of a pass outside its layers (loss, messages), and of a backward pass, relative to a layer's forward.
_PASS_LAUNCHES, _BACKWARD_LAUNCHES = 1.7, 1.6

# How far the host gets ahead in a pipeline with at most as many micro-batches as stages, relative to a longer one.
_SHORT_PIPELINE = 1.0 / 3.0


def queued_tensors(grid: Grid, overheads: Overheads, num_layers: int, ahead: Column | float) -> Column:
    """Return the whole-sequence tensors, each with a shard, that queued tensor-parallel collectives of a stage hold.

    There are two per layer and direction, limited by the depth of the launch queue. Without a pipeline, those of a
    backward pass may follow those of a forward pass in the queue. In a pipeline, a device slower than its host falls
    behind by the forward passes in flight, if more are to come. Any device falls behind while the pipeline fills,
    since it waits to send: by all forward passes but its own and the one sent.
    """
    m, n, pp = grid.num_micro_batches, float(num_layers), grid.pp
    fit = overheads.queued_collectives / 2.0
    deep = 2.0 * np.minimum(n, fit) + 2.0 * max(fit - n - _PASS_LAUNCHES, 0.0) / _BACKWARD_LAUNCHES
    alone = np.minimum(deep, 2.0 * n * (np.minimum(ahead / 0.3, 1.0) + ahead * (m - 1)))
    deep = 2.0 * fit * n / (n + _PASS_LAUNCHES)
    behind = ahead * np.where(m > pp, 1.0, _SHORT_PIPELINE) * 2.0 * n * np.minimum(pp, m)
    filling = np.where(ahead > 0.0, 2.0 * n * np.maximum(np.minimum(pp, m) - 2, 0), 0.0)
    piped = np.minimum(deep, np.maximum(behind, filling))
    return np.where(grid.tp > 1, np.where(pp > 1, piped, alone), 0.0)


# --- Bytes of a rank's model states by category, under ZeRO and offload.


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


# --- Peak memory of one stage's rank in a step of eager kernels, with or without a pipeline.


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


# --- Peak memory of a rank, by pipeline stage and category, in closed form.

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


# --- The plan for one rank of one case, as the suites compare it.


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Bytes of one rank."""

    parameters: float
    """Weights and masters."""
    gradients: float
    optimizer_states: float
    buffers: float = 0.0
    """Persistent communication buffers, and those that hold gradients."""
    tables: float = 0.0
    """Rotary positions, which every process keeps, and statistics of batch norms. Not included in the peak below."""
    host_parameters: float = 0.0
    """Masters that the host keeps in its memory and updates (ZeRO-Offload, arXiv:2101.06840 sec. 4).

    On a CPU this is the same memory as everything else. On a GPU the allocator does not count it.
    """
    host_gradients: float = 0.0
    """Gradients with which the host updates those masters."""
    host_optimizer_states: float = 0.0
    host_buffers: float = 0.0
    """Those gradients, if they are permanent."""
    activations: float | None = None
    """Activations when the step's first backward pass begins. None if they are not planned."""
    peak: float | None = None
    """Peak of the sum: on this rank at DeepSpeed's stage 2, otherwise on the fullest rank of the stage.

    None if activations are not planned, and where the planner does not know the copies. That applies to DeepSpeed in
    mixed precision, at stage 3 (whose modules gather their weights one by one), and with several parameter groups; to
    reductions in another dtype than the held gradients; to optimizers but AdamW and plain SGD; to a server with more
    than two replicas; and to pipeline chunks in another order than interleaved 1F1B.
    """
    backward_peak: float | None = None
    """Peak of the backward passes only. Activations that adapters declare are added to it."""

    def with_host(self) -> ModelStates:
        """Return the states for a machine whose host memory is the device's memory."""
        return replace(
            self,
            parameters=self.parameters + self.host_parameters,
            gradients=self.gradients + self.host_gradients,
            optimizer_states=self.optimizer_states + self.host_optimizer_states,
            buffers=self.buffers + self.host_buffers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraMemory:
    """Bytes that a framework holds beyond (or, if negative, short of) the closed form, and why."""

    category: str
    """parameters, gradients, optimizer_states or activations; steady for permanent memory; peak for memory only at the
    peak; or unnamed for memory that may but need not be there, where no peak is planned.
    """
    num_bytes: float
    reason: str
    on_host: bool = False
    """True if it is in host memory, which is the device's memory only on a CPU."""


def declared_bytes(declared: Sequence[ExtraMemory], category: str) -> float:
    """Return the declared bytes of one category.

    "steady" includes everything permanent. "peak" includes all but gradients, which the recipe's path accounts for.
    """
    always = ("parameters", "optimizer_states", "steady")
    here = {"steady": always, "peak": (*always, "activations", "peak")}.get(category, (category,))
    return sum(r.num_bytes for r in declared if r.category in here)


def declared_peak(plan: ModelStates, declared: Sequence[ExtraMemory]) -> float | None:
    """Return the planned peak with what is declared.

    Declared activations count in backward passes, not in the update.
    """
    if plan.peak is None:
        return None
    whole = plan.peak + declared_bytes(declared, "peak")
    if plan.backward_peak is None or plan.backward_peak == plan.peak:
        return whole
    updating = whole - declared_bytes(declared, "activations")
    return max(updating, plan.backward_peak + declared_bytes(declared, "peak"))


def model_states(case: Case, rank: int, recipe: TrainingRecipe | None = None) -> ModelStates | None:
    """Return what `rank` must hold under `case`'s layout.

    For models other than decoder-only transformers, and for folded stages, only states are planned, which follow from
    the number of parameters. None if that number is unknown, or not sufficient.
    """
    model, layout = case.workload.model, case.layout
    grid = layout_grid(layout, case.workload.global_batch, layout.coordinates(rank).dp)
    using = recipe or eager_recipe(case)
    transformer = theory_of(model).transformer
    if layout.folded or transformer is None:
        if using.states.matrix_wise or (counts := theory_of(model).trained_and_frozen(layout, rank)) is None:
            return None
        count, num_frozen = counts
        if num_frozen and not _holds_frozen_weights_alone(case, using):
            return None
        states = state_bytes(np.array([float(count)]), grid, using)
        # A frozen parameter has weights, sharded like the others, and neither a gradient nor moments.
        frozen = state_bytes(np.array([float(num_frozen)]), grid, using)
        activations = None
        if _is_exact(case) and using.activations_known and using.eager:
            casts = using.eager.casts_weights
            activations = theory_of(model).activation_bytes(case, rank, METERED_STEP, casts_weights=casts)
            if activations is not None:
                activations += _kept_weights(case, using)
        return ModelStates(
            parameters=float(states["parameters"][0] + frozen["parameters"][0]),
            gradients=float(states["gradients"][0]),
            optimizer_states=float(states["optimizer"][0]),
            buffers=_received(case, rank, using) + _lasting_gradients(case, using, float(states["gradients"][0])),
            tables=theory_of(model).table_bytes(layout, rank, case.precision) + _kept_by_the_model(case, rank, using),
            **_host_states(layout, using, count),
            activations=activations,
        )
    index = layout.coordinates(rank).pp
    held = stage_memory(transformer, grid, using, Overheads(), index)
    exact = _is_exact(case) and using.activations_known
    path = using.backward.gradient_path
    known = _temporaries_are_known(case) and (not case.precision.is_mixed or path not in DEEPSPEED_PATHS)
    known &= path is not GradientPath.MODULES and layout.offload is Offload.NONE
    known &= path is not GradientPath.STREAMED or not case.workload.optimizer.groups_decay
    known &= layout.virtual_stages == 1 or using.backward.interleaves
    known &= using.peak_known
    peak = backward = None
    if exact and known and layout.recompute is Recompute.NONE:
        peak = float(held.total_bytes[0])
        backward = peak - float(update_excess(transformer, grid, using, index)[0]) if using.eager else None
    return ModelStates(
        parameters=float(held.parameters[0]),
        gradients=float(held.gradients[0]),
        optimizer_states=float(held.optimizer[0]),
        buffers=_received(case, rank, using) + _lasting_gradients(case, using, float(held.gradients[0])),
        tables=theory_of(model).table_bytes(layout, rank, case.precision),
        **_host_states(layout, using, local_parameters(model, layout, rank) or 0),
        activations=float(held.activations[0]) if exact else None,
        peak=peak,
        backward_peak=backward,
    )


def _kept_by_the_model(case: Case, rank: int, using: TrainingRecipe) -> float:
    """Return the bytes of values that a model's own code keeps between steps."""
    casts = bool(using.eager and using.eager.casts_weights)
    return theory_of(case.workload.model).kept_bytes(case, rank, METERED_STEP, casts_weights=casts)


def _kept_weights(case: Case, using: TrainingRecipe) -> float:
    """Return the bytes of gathered weights, of blocks and of the root, that stay from a forward pass to its
    backward.
    """
    model = case.workload.model
    root = model.embedding_parameters + model.head_parameters
    kept = using.backward.kept_share * (model.num_parameters - root) + using.backward.keeps_root * root
    return using.wire.gather_bytes * kept


def _holds_frozen_weights_alone(case: Case, using: TrainingRecipe) -> bool:
    """Return whether it is known that a frozen parameter has weights, and no master and no room for a gradient.

    Flat parameters have gradients as a whole (FSDP1), DeepSpeed keeps no masters of frozen ones, and at stages 1 and 2
    it is the framework's choice which rank keeps the moments of which tensor.
    """
    flat = using.backward.gradient_path in (GradientPath.FLAT_UNITS, *DEEPSPEED_PATHS)
    whole = case.layout.zero_stage in (0, 3) and case.layout.offload is Offload.NONE
    return whole and not case.precision.is_mixed and not flat


def _received(case: Case, rank: int, using: TrainingRecipe) -> float:
    """Return the bytes of the receive buffers of pipeline stages, which are allocated once."""
    layout, model = case.layout, case.workload.model
    if layout.pp == 1 or not using.receive_buffers:
        return 0.0
    theory = theory_of(model)
    if (stream := theory.stream) is None:
        own, num_stages = layout.coordinates(rank).pp, layout.pp * layout.virtual_stages
        ranks = [layout.pipeline_rank(stage) for stage in range(num_stages)]
        borders = [b for b in range(num_stages - 1) if (ranks[b] == own) != (ranks[b + 1] == own)]
        sent = sum(theory.boundary_numbers(num_stages, boundary) or 0 for boundary in borders)
        return sent * case.workload.global_batch / layout.dp * case.precision.wide.itemsize
    grid = layout_grid(layout, case.workload.global_batch)
    stages = layout.stages_of(layout.coordinates(rank).pp)
    ends = (stages[0] == 0) + (stages[-1] == layout.pp * layout.virtual_stages - 1)
    inside = 2 * sum(after == before + 1 for before, after in itertools.pairwise(stages))  # handed over, both ways
    return float(received_bytes(stream, grid, using, ends + inside)[0])


def _host_states(layout: Layout, using: TrainingRecipe, num_parameters: int) -> dict[str, float]:
    """Return the offloaded states that the host keeps: masters, fp32 gradients and moments of a rank's share.

    These are 16 bytes per parameter minus the weights (arXiv:2101.06840 sec. 3.2, with fp32 gradients). Empty for
    states on disk.
    """
    if layout.offload is not Offload.CPU:
        return {}
    share, states = num_parameters / (layout.dp * layout.cp if layout.zero_stage else 1), using.states
    for_life = using.backward.gradient_path in (GradientPath.FLAT_UNITS, *DEEPSPEED_PATHS)
    return {
        "host_parameters": states.master_bytes * share,
        "host_gradients": states.master_bytes * share,
        "host_optimizer_states": states.moment_bytes * share,
        "host_buffers": states.master_bytes * share * for_life,
    }


def _lasting_gradients(case: Case, using: TrainingRecipe, held: float) -> float:
    """Return the bytes that remain after gradients are cleared. `held` is the bytes before the update.

    These are FSDP1's flat gradients, DDP's buckets (gradients are views of them), or the flat tensor of DeepSpeed's
    stage 3 and its bucket.
    """
    match using.backward.gradient_path:
        case GradientPath.BUCKETS | GradientPath.FLAT_UNITS:
            return held
        case GradientPath.MODULES:
            return held + using.states.gradient_bytes * bucket_elements(case.workload.model)
    return 0.0


def _temporaries_are_known(case: Case) -> bool:
    """Return whether the temporaries of the reduction and of the update are known."""
    optimizer = case.workload.optimizer
    plain = not optimizer.is_matrix_wise and not optimizer.momentum
    planned = case.workload.algorithm.update_memory_is_planned(case.layout.dp)
    return plain and not case.precision.narrows_reduction and planned


def _is_exact(case: Case) -> bool:
    """Return whether planned activations were verified against what PyTorch saves.

    They were for PyTorch's own choice of kernels, without dropout, selective recomputation (or any under autocast),
    sequence and context parallelism; and in a pipeline under GPipe's schedule (arXiv:1811.06965), 1F1B and interleaved
    1F1B (arXiv:2104.04473).
    """
    layout, again = case.layout, case.layout.recompute
    plain = again is Recompute.NONE or (again is Recompute.FULL and not case.precision.is_mixed)
    plain = plain and layout.cp == 1 and not layout.sequence_parallel and case.workload.model.dropout == 0
    plain = plain and not case.tuning.passes_otherwise
    return plain and (layout.pp == 1 or layout.schedule is not Schedule.ZERO_BUBBLE)


def micro_batch_tokens(case: Case) -> int:
    """Return the tokens of a micro-batch on one rank."""
    layout, workload = case.layout, case.workload
    return workload.global_batch // (layout.dp * layout.num_micro_batches) * workload.model.seq_len


def __getattr__(name: str) -> type:
    """Return a class by its name in an older version, with a `DeprecationWarning`."""
    if name != "Remainder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Remainder is now called ExtraMemory", DeprecationWarning, stacklevel=2)
    return ExtraMemory
