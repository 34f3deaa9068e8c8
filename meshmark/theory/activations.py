"""Bytes that forward passes keep for the backward pass.

Selective recomputation of single modules saves some of them: Megatron-Core's `recompute_modules`. A checkpointed module
(`core_attn`, `mlp`, `moe`, `shared_experts`) keeps its input and nothing inside. Other modules drop only their output
and compute it again (Megatron-Core's `CheckpointWithoutOutput`). A norm is repeated only if it is a separate module:
`TELayerNormColumnParallelLinear` contains the norms of dense layers with grouped attention.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from meshmark.errors import InputError
from meshmark.models.transformer import Family, ModelSpec
from meshmark.spec.layout import Recompute, RecomputeModule, Schedule
from meshmark.theory.backward_pass import (
    INDEX_BYTES,
    RNG_STATE_BYTES,
    block_bytes,
    cast_weight_bytes,
    head_bytes,
)
from meshmark.theory.grid import MODULES, SCHEDULES, Column, Grid
from meshmark.theory.model_theory import stage_parameters
from meshmark.theory.partition import Stage
from meshmark.theory.recipe import TrainingRecipe

# --- Selective recomputation of modules: Megatron-Core's `recompute_modules`.


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A module of one layer, by what repeating it changes. Bytes and weights are of one token, before division."""

    between: float = 0.0
    """Bytes no longer kept between tensor-parallel regions, which only sequence parallelism divides."""
    inside: float = 0.0
    """Bytes no longer kept inside of them, which tensor parallelism divides."""
    weights: float = 0.0
    """Matrix weights whose forward products are repeated."""
    routed_weights: float = 0.0
    """Those of them that belong to routed experts."""
    moved: float = 0.0
    """Bytes that its element-wise kernels read and write again."""
    collectives: float = 0.0
    """Tensor-parallel collectives that are repeated."""


def kept_product_bytes(recipe: TrainingRecipe) -> float:
    """Return the bytes of a value that a linear layer keeps as its input.

    Transformer Engine keeps the inputs of products in 8 bits as it casts them.
    """
    if recipe.products and recipe.activations.fused_elementwise:
        return recipe.products.num_bytes
    return recipe.activations.element_bytes


def gate_tensors(model: ModelSpec, recipe: TrainingRecipe) -> float:
    """Return the tensors of the inner width that a feed-forward network keeps: what a gate (or GELU) reads, and what
    the second product reads.

    A fused gate keeps its two inputs, and the product after it its own: SwiGLUFunction of Megatron-LM's
    core/fusions/fused_bias_swiglu.py.
    """
    if model.family is Family.GPT:
        return 2.0
    return 3.0 if recipe.activations.fused_elementwise else 4.0


def skipped_weights(model: ModelSpec, recipe: TrainingRecipe) -> float:
    """Return the weights of a layer whose products full recomputation does not repeat."""
    return model.hidden * model.active_ffn if recipe.activations.skips_last_product else 0.0


def repeated(model: ModelSpec, recipe: TrainingRecipe, module: RecomputeModule) -> Repeated:
    """Return what repeating `module` in every layer changes, on average over layers. Scores, which are not counted by
    width, are left to the caller. All zeros if the model has no such module.
    """
    h, width, product = model.hidden, recipe.activations.element_bytes, kept_product_bytes(recipe)
    matrices = 2.0 if model.family is Family.GPT else 3.0
    inner = (gate_tensors(model, recipe) - 1.0) * width + product  # bytes of each value of the inner width
    gate = 2.0 * width if model.family is Family.GPT else 3.0 * width  # bytes moved for each: read, and written
    routed, shared = model.routed_ffn, model.shared_experts_ffn
    dense = model.active_ffn - routed - shared
    has_dense, has_experts = 1.0 - model.routing_share, model.routing_share
    if module is RecomputeModule.MLP and has_dense:
        # Its first product holds the norm before it, whose output is thus kept no longer either.
        return Repeated(
            between=has_dense * product * h,
            inside=inner * dense,
            weights=(matrices - recipe.activations.skips_last_product) * h * dense,
            moved=gate * dense + has_dense * 2.0 * width * h,
            collectives=2.0 * has_dense,
        )
    if module is RecomputeModule.MOE and has_experts:
        # Tokens are put in the order of their experts and back, each read and written.
        sent = width * model.dispatched * h
        return Repeated(
            inside=inner * (routed + shared) + 2.0 * sent,
            weights=matrices * h * (routed + shared),
            routed_weights=model.routed_weights,
            moved=gate * (routed + shared) + 4.0 * sent,
        )
    if module is RecomputeModule.MOE_ACT:
        return Repeated(inside=product * routed, moved=gate * routed)
    if module is RecomputeModule.SHARED_EXPERTS:
        return Repeated(inside=inner * shared, weights=matrices * h * shared, moved=gate * shared)
    if module is RecomputeModule.LAYERNORM:
        norms = has_experts + (1.0 if model.latent_weights else 0.0)
        return Repeated(between=norms * product * h, moved=norms * 2.0 * width * h)
    if module is RecomputeModule.MLA_UP_PROJ:
        made = model.latent_outputs
        return Repeated(inside=width * made, weights=model.latent_weights, moved=2.0 * width * made)
    return Repeated()


def expect_modules(model: ModelSpec, modules: frozenset[RecomputeModule]) -> None:
    """Raise `InputError` for a module that the model does not have, or that another one contains."""
    has_experts = model.routing_share > 0.0
    there = {
        RecomputeModule.MLP: model.routing_share < 1.0,
        RecomputeModule.MOE: has_experts,
        RecomputeModule.MOE_ACT: has_experts,
        RecomputeModule.SHARED_EXPERTS: model.shared_experts_ffn > 0.0,
        RecomputeModule.LAYERNORM: has_experts or model.latent_weights > 0.0,
        RecomputeModule.MLA_UP_PROJ: model.latent_weights > 0.0,
    }
    if missing := sorted(module for module in modules if not there.get(module, True)):
        why = " (the norms of its layers are part of the products after them)" if missing == ["layernorm"] else ""
        has = ", ".join(module for module in RecomputeModule if there.get(module, True))
        raise InputError(f"recompute_modules {', '.join(missing)}: {model.name!r} has none{why}; it has {has}")
    inner = modules & {RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS}
    if RecomputeModule.MOE in modules and inner:
        raise InputError(f"recompute_modules: moe contains {', '.join(sorted(inner))}; leave one of them out")


# --- Bytes that forward passes keep for the backward pass.


def tokens(model: ModelSpec, grid: Grid) -> Column:
    """Return the tokens of one micro-batch on one rank."""
    return grid.micro_batch * model.seq_len / grid.cp


def layer_activation_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes that one layer keeps for one micro-batch.

    GPT: arXiv:2205.05198 table 2, s b h (10 + 24/t + 5as/ht), all divided by t with sequence parallelism. Without
    dropout masks the 34 are 32 and the 5 are 4. The 24 are 8 of attention (fewer where queries share keys) and 4f/h.
    Flash attention, like selective recomputation, keeps 4a/h instead of the scores. LLaMA: four tensors of h between
    the parallel regions, q, k, v and the output, and `gate_tensors` of f. Modules that are repeated keep less:
    `Repeated`. For eager kernels, see `backward_pass.py`.
    """
    t, h, s = grid.tp.astype(float), model.hidden, model.seq_len / grid.cp
    width = recipe.activations.element_bytes
    if recipe.eager:
        kept = block_bytes(model, recipe.eager, t, sequence_shards(grid))
        stream = recipe.eager.stream * h / sequence_shards(grid)
        return tokens(model, grid) * np.where(grid.recomputes(Recompute.FULL), stream, kept)
    product = kept_product_bytes(recipe)
    inside = width * (model.saved_attention + gate_tensors(model, recipe) * model.active_ffn)
    if model.family == "gpt":
        between = (5.0 if recipe.activations.dropout_masks else 4.0) * width * h
        scores = 5.0 if recipe.activations.dropout_masks else 4.0
    else:
        between = (2.0 + model.layer_norms) * width * h  # every norm's input, and what products read of two
        # Adapters keep what is between their two matrices; the linear layers' inputs, which the first ones need, are
        # kept in any case.
        inside += width * 4.0 * recipe.adapter_rank
        # Tokens as experts get them, and what the experts make of them, which their weights' gradient needs.
        inside += width * 2.0 * model.dispatched * h
        scores = 4.0
    if product != width:
        # Of products' inputs, these are the outputs of both norms, the input of the second feed-forward product, and
        # one more of attention's output, which attention keeps in 16 bits.
        saved = width - product
        between -= 2.0 * saved * h
        inside += product * h - saved * model.active_ffn
    core = np.where(_keeps_scores(grid, recipe), scores * width / 2.0 * model.num_heads * s, 4.0 * model.num_heads)
    core = np.where(repeats_core(grid, recipe), 0.0, core)
    sp = np.where(grid.sequence_parallel, t, 1.0)
    per_token = between / sp + (inside + core) / t
    per_token = per_token - module_bytes(model, grid, recipe)
    if recipe.activations.keeps_products:
        chosen = repeats_operations(grid, recipe) | (grid.recompute_modules > 0)
        per_token = np.where(chosen, _kept_products_bytes(model, grid, recipe), per_token)
    elif recipe.activations.flash_attention:
        products = 3.0 * h + 2.0 * model.kv_hidden + 2.0 * model.active_ffn
        some = width * (h / sp + (h + 0.5 * products) / t)
        per_token = np.where(repeats_operations(grid, recipe), some, per_token)
    full = width * h / sp
    return tokens(model, grid) * np.where(grid.recomputes(Recompute.FULL), full, per_token)


def _kept_products_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes of a token that one layer keeps where it keeps products with weights, and repeats all else.

    These are a layer's input and the outputs of its products: q, k, v, attention's projection and the gate's two (one
    without a gate); nothing reads the last one's again. Named modules keep none of theirs. Attention's own output is
    kept where modules are named and it is not among them.
    """
    t, width = grid.tp, recipe.activations.element_bytes
    sp = np.where(grid.sequence_parallel, t, 1.0)
    gated = 1.0 if model.family is Family.GPT else 2.0
    network = gated * model.active_ffn + model.dispatched * model.hidden
    inner = model.query_hidden + 2.0 * model.kv_hidden + np.where(grid.repeats(RecomputeModule.MLP), 0.0, network)
    core = (grid.recompute_modules > 0) & ~grid.repeats(RecomputeModule.CORE_ATTN)
    kept: Column = width * (2.0 * model.hidden / sp + (inner + np.where(core, model.query_hidden, 0.0)) / t)
    return kept


def module_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes of a token that one layer does not keep because modules of it are repeated, but for scores."""
    found = np.zeros(len(grid))
    if grid.recompute_modules.any():
        sp = np.where(grid.sequence_parallel, grid.tp, 1)
        for module in MODULES:
            one = repeated(model, recipe, module)
            found += np.where(grid.repeats(module), one.between / sp + one.inside / grid.tp, 0.0)
    return found


def repeats_operations(grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return where selective recomputation repeats the operations that a recipe chooses, and no modules."""
    found: Column = _is_unnamed(grid) & (not recipe.activations.selective_core)
    return found


def repeats_core(grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return where selective recomputation repeats the attention core, by name or because the recipe does."""
    chosen = _is_unnamed(grid) & recipe.activations.selective_core
    found: Column = grid.repeats(RecomputeModule.CORE_ATTN) | chosen
    return found


def _is_unnamed(grid: Grid) -> Column:
    """Return where recomputation is selective and names no modules."""
    found: Column = grid.recomputes(Recompute.SELECTIVE) & (grid.recompute_modules == 0)
    return found


def without_recompute(grid: Grid) -> Grid:
    """Return the same layouts, which recompute nothing."""
    nothing = np.zeros_like(grid.recompute)
    return dataclasses.replace(grid, recompute=nothing, recompute_modules=nothing)


def repeated_layers(grid: Grid, stage: Stage) -> Column:
    """Return the layers of a stage that full recomputation repeats. Zero where recomputation is not full."""
    chosen = np.where(grid.recompute_layers > 0, grid.recompute_layers * grid.virtual_stages, stage.num_layers)
    full = grid.recomputes(Recompute.FULL)
    found: Column = np.where(full, np.minimum(chosen, stage.num_layers), 0)
    return found


def stage_layer_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage) -> Column:
    """Return the bytes that the layers of a stage keep of one micro-batch.

    Full recomputation keeps one input for each unit of layers of a chunk. Layers beyond the first `recompute_layers` of
    a chunk keep everything.
    """
    layer = layer_activation_bytes(model, grid, recipe)
    every: Column = float(stage.num_layers) * layer
    if (grid.recompute_layers == 0).all() and (grid.recompute_unit == 1).all():
        return every
    again, chunks = repeated_layers(grid, stage), grid.virtual_stages
    inputs = np.ceil(again / chunks / grid.recompute_unit) * chunks
    plain = layer_activation_bytes(model, without_recompute(grid), recipe)
    full = grid.recomputes(Recompute.FULL)
    found: Column = np.where(full, inputs * layer + (stage.num_layers - again) * plain, every)
    return found


def offloaded_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage, index: int) -> Column:
    """Return the bytes of activations that a rank keeps in host memory.

    Two layers of them are on the device as well: one leaves, or comes back, while the next is computed.
    """
    if not grid.offload_layers.any() or not stage.num_layers:
        return np.zeros(len(grid))
    share = np.minimum(grid.offload_layers, stage.num_layers) / stage.num_layers
    passes = num_in_flight(grid, index) / grid.virtual_stages
    found: Column = share * passes * stage_layer_bytes(model, grid, recipe, stage)
    return found


def _keeps_scores(grid: Grid, recipe: TrainingRecipe) -> Column:
    kept = grid.recomputes(Recompute.NONE) | (grid.recompute_modules > 0)
    keeps: Column = kept & (not recipe.activations.flash_attention)
    return keeps


def held_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe, stage: Stage, index: int) -> Column:
    """Return the bytes that the forward passes of all micro-batches in flight keep for the backward pass.

    For eager kernels this includes the embedding's positions and the head's norm and log-softmax. The input of a later
    stage lies in its receive buffer and counts there.
    """
    flight = num_in_flight(grid, index)
    if recipe.eager is None:
        passes = flight / grid.virtual_stages
        held: Column = passes * stage_layer_bytes(model, grid, recipe, stage)
        away = offloaded_bytes(model, grid, recipe, stage, index)
        moving = 2.0 / max(stage.num_layers, 1) * stage_layer_bytes(model, grid, recipe, stage)
        held = held - np.maximum(away - moving, 0.0) + np.ceil(passes) * boundary_bytes(model, grid, recipe)
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
    again = grid.recomputes(Recompute.FULL)
    more = np.where(again, float(stage.num_layers * RNG_STATE_BYTES), 0.0)
    if stage.has_head:
        more = more + tokens(model, grid) * head_bytes(model, widths, vocabulary_shards(grid, recipe), sp)
    if not stage.has_embedding:
        more = more - tokens(model, grid) * widths.stream * model.hidden / sp
    elif model.family is Family.GPT:
        more = more + INDEX_BYTES * model.seq_len / grid.cp
    if recipe.backward.keeps_root:
        root = stage_parameters(model, dataclasses.replace(stage, num_layers=0), grid.tp)
        more = more + recipe.wire.gather_bytes * root
    more = more + stage.num_layers * kept_weight_bytes(model, grid, recipe)
    if widths.autocast:
        more = more + cast_weight_bytes(model, stage.num_layers, stage.has_head) / grid.tp
    found: Column = passes * stage.num_layers * layer + passes * more
    return found


def kept_weight_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes of a block's gathered weights that are kept from its forward to its backward pass.

    A rank that is alone copies its weights too (`wait_for_unshard` of PyTorch's
    fsdp/_fully_shard/_fsdp_param_group.py).
    """
    kept: Column = recipe.backward.kept_share * recipe.wire.gather_bytes * model.block_parameters / grid.tp
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
