"""Time of an optimizer step by its parts, in closed form. `simulator.py` simulates what this approximates.

Letters are as in `memory.py`. A stage's micro-batch takes the larger of its device time and the floor that launches
and stream hand-overs set. The slowest stage sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.models.transformer import ModelSpec
from meshmark.plan.bubble import host_lag, message_wait_seconds, waits_for_messages
from meshmark.plan.network import (
    AttentionTime,
    expert_seconds,
    point_to_point_seconds,
    ring_attention_seconds,
    tensor_collective_seconds,
)
from meshmark.plan.rates import REACHED, Rates
from meshmark.plan.update_time import StageLoad, data_seconds, optimizer_seconds, tied_seconds
from meshmark.spec.hardware import GPUS, Gpu
from meshmark.spec.layout import Recompute, RecomputeModule
from meshmark.theory.activations import (
    layer_activation_bytes,
    repeated,
    repeated_layers,
    repeats_core,
    repeats_operations,
    skipped_weights,
    tokens,
    without_recompute,
)
from meshmark.theory.bubble import bubble_seconds
from meshmark.theory.grid import MODULES, Column, Grid
from meshmark.theory.model_theory import layer_matrix_parameters, stage_adapters, stage_experts, stage_parameters
from meshmark.theory.partition import Stage
from meshmark.theory.recipe import TrainingRecipe

_H100 = GPUS["h100"]
"""The GPU whose share of narrower products others take that have none."""
PARTS = (
    "matmul",
    "attention",
    "elementwise",
    "tensor_communication",
    "context_communication",
    "expert_communication",
    "activation_offload",
    "launch_floor",
    "point_to_point",
    "bubble",
    "message_wait",
    "data_communication",
    "optimizer",
    "host",
)
STAGE_PARTS = PARTS[:9]
"""Parts that a stage spends on every micro-batch."""
# Collectives in one layer under sequence parallelism: an all-gather and a reduce-scatter in each of two blocks forward;
# backward, two more all-gathers (inputs are gathered again). Without it: four all-reduces, counted twice.
_FORWARD_GATHERS, _BACKWARD_GATHERS = 2.0, 4.0
_SCATTERS = 2.0
_BLOCK_SCALED = 7.161 / 6.812
"""Time of products in MXFP8 over that of products in fp8 with a scale a tensor.

The 12 products of a layer 4,096 wide took 7.161 and 6.812 ms on B300, of inputs that were cast before (github:NVIDIA/
TransformerEngine 8f2e635 docs/examples/gemm_profiling/gemm_profiling.rst).
"""
_FURTHER_READS = {"nvfp4": 2.0}
"""How often a cast reads a value beyond the first time.

Transformer Engine's NVFP4Quantizer reads it for the tensor's largest value, for rows, and, transformed by Hadamard's
matrix, for columns (`nvte_hadamard_transform_amax`, `nvte_quantize_v2`, `hadamard_transform_cast_fusion_columnwise`).
"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, one row per layout. The parts add up to `total_seconds`."""

    matmul: Column
    attention: Column
    elementwise: Column
    tensor_communication: Column
    context_communication: Column
    """Sending keys and values around a ring, as far as attention does not hide it."""
    expert_communication: Column
    """Sending tokens to the ranks of their experts and back."""
    activation_offload: Column
    """Moving activations to host memory and back, as far as their layers do not hide it."""
    launch_floor: Column
    """Wait of the slowest stage because its kernels are too short."""
    point_to_point: Column
    bubble: Column
    """Filling and draining the pipeline."""
    message_wait: Column
    """Sleep between polls for pipeline messages, if a framework polls."""
    data_communication: Column
    """Data-parallel communication that no computation hides."""
    optimizer: Column
    host: Column
    lag: Column
    """How far the host runs ahead of the device, 0 to 1; see `memory`."""

    @property
    def total_seconds(self) -> Column:
        return sum((getattr(self, name) for name in PARTS), start=np.zeros(len(self.matmul)))


def step_time(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> StepTime:
    """Return the step time of every layout."""
    out = {name: np.zeros(len(grid)) for name in (*PARTS, "lag")}
    for pp, rows in grid.by_pipeline():
        for name, column in _pipeline_time(model, grid.take(rows), pp, gpu, recipe, rates).items():
            out[name][rows] = column
    return StepTime(**out)


def _pipeline_time(
    model: ModelSpec, grid: Grid, pp: int, gpu: Gpu, recipe: TrainingRecipe, rates: Rates
) -> dict[str, Column]:
    """Return all parts for layouts of one pipeline degree."""
    cut = recipe.cut.stages(model, pp)
    by_stage = _stage_accounts(model, grid, cut, gpu, recipe, rates)
    totals = _stage_totals(by_stage)
    slowest, columns = totals.argmax(axis=0), np.arange(len(grid))
    pace = totals[slowest, columns]
    m = grid.num_micro_batches
    out = {name: m * np.stack([p[name] for p in by_stage])[slowest, columns] for name in STAGE_PARTS}
    out["bubble"] = bubble_seconds(grid, totals, pace)
    out["point_to_point"] = out["point_to_point"] + _warmup_sends_seconds(model, grid, gpu, recipe, rates)
    num_parameters = np.array([stage_parameters(model, stage) for stage in cut])
    held = num_parameters.max() / grid.tp
    heaviest = held
    if recipe.adapter_rank:
        heaviest = np.stack([stage_adapters(model, stage, recipe.adapter_rank, grid.tp) for stage in cut]).max(axis=0)
    experts = np.stack([stage_experts(model, stage, grid) for stage in cut]).max(axis=0)
    embedding = (0.0 if recipe.adapter_rank else 1.0) * model.vocab_size * model.hidden / grid.tp
    load = StageLoad(
        num_parameters=heaviest,
        gathered=held,
        experts=experts,
        embedding=embedding,
        num_layers=max(stage.num_layers for stage in cut),
        step_seconds=m * pace,
        backward_seconds=pace * 2.0 / 3.0,
    )
    tied = tied_seconds(model, grid, embedding, gpu, recipe, rates)
    out["data_communication"] = data_seconds(grid, load, gpu, recipe, rates) + tied
    waits = waits_for_messages(grid, rates, gpu.gpus_per_node)
    out["message_wait"] = np.where(waits, message_wait_seconds(grid, rates), 0.0)
    out["optimizer"] = optimizer_seconds(grid, heaviest, gpu, recipe, rates)
    if model.expert_parameters:
        out["optimizer"] = out["optimizer"] + optimizer_seconds(grid, experts, gpu, recipe, rates, grid.expert_shards)
    out["host"] = rates.host.step_seconds + np.where(
        grid.tp > gpu.gpus_per_node, rates.host.tp_step_seconds * (grid.tp - 1), 0.0
    )
    device = np.stack([p["device"] for p in by_stage])[slowest, columns]
    floor = np.stack([p["floor"] for p in by_stage])[slowest, columns]
    out["lag"] = np.where(waits, 0.0, host_lag(grid, device, floor, gpu.gpus_per_node))
    return out


def _warmup_sends_seconds(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Column:
    """Return the time of an interleaved pipeline's sends that nothing hides: those of its warm-up and of its end.

    Until the first backward pass a rank receives, computes and sends one chunk after another, and so at the end
    (Megatron-Core's `overlap_p2p_comm_warmup_flush`, off unless it is turned on). The first rank runs
    2(p - 1) + (v - 1)p chunks so (arXiv:2104.04473 sec. 2.2.2).
    """
    v, p = grid.virtual_stages, grid.pp
    passes = np.minimum(2 * (p - 1) + (v - 1) * p, grid.num_micro_batches * v)
    hop = point_to_point_seconds(grid, _sent_bytes(model, grid, recipe), rates, gpu.gpus_per_node)
    return np.where((v > 1) & recipe.wire.hides_sends, 2.0 * passes * hop, 0.0)


def stage_seconds(model: ModelSpec, grid: Grid, pp: int, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Column:
    """Return the seconds of one micro-batch on each stage (rows), for layouts (columns) that all have `pp` stages."""
    cut = recipe.cut.stages(model, pp)
    return _stage_totals(_stage_accounts(model, grid, cut, gpu, recipe, rates))


def _stage_totals(by_stage: Sequence[dict[str, Column]]) -> Column:
    return np.stack([sum(parts[name] for name in STAGE_PARTS) for parts in by_stage])


def _stage_accounts(
    model: ModelSpec, grid: Grid, cut: tuple[Stage, ...], gpu: Gpu, recipe: TrainingRecipe, rates: Rates
) -> list[dict[str, Column]]:
    """Return every stage's parts of one micro-batch. Equal stages with equally many neighbours are computed once."""
    pieces = _pieces(model, grid, gpu, recipe, rates)
    found: dict[tuple[Stage, int], dict[str, Column]] = {}
    keys = [(stage, (i > 0) + (i < len(cut) - 1)) for i, stage in enumerate(cut)]
    for stage, neighbours in dict.fromkeys(keys):
        found[stage, neighbours] = _stage_seconds(grid, stage, neighbours, pieces, gpu, rates)
    return [found[key] for key in keys]


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """Times and sizes of the building blocks of stages, for one micro-batch."""

    layer: dict[str, Column]
    plain: dict[str, Column]
    """A layer without recomputation, where only some are repeated."""
    offloaded: Column
    """Seconds that offloading one layer's activations adds."""
    head: dict[str, Column]
    embedding: Column
    """Seconds."""
    sent_bytes: Column
    """Bytes sent from stage to stage."""
    logit_bytes: Column
    """Bytes of logits, if the loss is on another stage than the head."""
    hides_sends: bool
    """True if interleaved stages hide their sends."""


def _pieces(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> _Pieces:
    memory = gpu.memory_bandwidth * rates.kernels.memory_efficiency
    head = _head_seconds(model, grid, gpu, recipe, rates)
    layer = _layer_seconds(model, grid, gpu, recipe, rates)
    some = (grid.recompute_layers > 0).any()
    return _Pieces(
        layer=layer,
        plain=_layer_seconds(model, without_recompute(grid), gpu, recipe, rates) if some else layer,
        offloaded=_offload_seconds(model, grid, layer, gpu, recipe),
        head=head,
        embedding=model.vocab_size * model.hidden / grid.tp * (0.0 if recipe.adapter_rank else 10.0) / memory,
        sent_bytes=_sent_bytes(model, grid, recipe),
        logit_bytes=head["logits"] * recipe.activations.element_bytes,
        hides_sends=recipe.wire.hides_sends,
    )


def _sent_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return the bytes of one send from stage to stage.

    Without sequence parallelism each rank still sends its share only (arXiv:2104.04473 sec. 4.1, scatter/gather), in
    frameworks that know how.
    """
    whole = tokens(model, grid) * model.hidden * recipe.activations.element_bytes
    return whole / (1 if recipe.wire.sends_whole else grid.tp)


def _layer_seconds(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> dict[str, Column]:
    """Return the parts of one layer's forward and backward pass of one micro-batch, including recomputation."""
    t, num_tokens = grid.tp.astype(float), tokens(model, grid)
    peak, memory = gpu.peak(recipe.arithmetic), gpu.memory_bandwidth * rates.kernels.memory_efficiency
    full = grid.recomputes(Recompute.FULL)
    kept = recipe.activations.keeps_products
    half = 3.0 if kept else 3.5  # every second product is repeated, where none is kept as it is
    core_again = full | (repeats_operations(grid, recipe) & (kept or not recipe.activations.flash_attention))
    core_again = core_again | repeats_core(grid, recipe)
    some = repeats_operations(grid, recipe) & recipe.activations.flash_attention
    again = _repeated_modules(model, grid, recipe)
    weights, reached = layer_matrix_parameters(model) / t, peak * _gemm_efficiency(model, rates)
    frozen = 1.0 if recipe.adapter_rank else 0.0  # products that make gradients of weights, and are not computed
    last = skipped_weights(model, recipe) / t
    products = 2.0 * num_tokens * (weights * (np.where(some, half, 3.0) - frozen) + np.where(full, weights - last, 0.0))
    adapters = recipe.adapter_rank * model.adapted_widths / t
    products = products + 6.0 * num_tokens * adapters
    products = products + 2.0 * num_tokens * again["weights"] / t
    matmul = _linear_seconds(products, model, gpu, recipe, rates)
    # An expert's products are as narrow as the expert.
    if model.routed_width:
        narrower = rates.kernels.gemm_half_width * (1.0 / model.routed_width - 1.0 / model.hidden)
        times = np.where(full, 4.0, np.where(some, half, 3.0)) * model.routed_weights + again["routed_weights"]
        routed = 2.0 * num_tokens / t * times
        matmul = matmul + routed * narrower / (peak * rates.kernels.gemm_efficiency)
    core = 2.0 * num_tokens * model.seq_len * model.attention_width / t
    if recipe.activations.flash_attention:
        # A kernel sees a rank's part of a sequence: in a ring, this many queries and keys at a time.
        length = model.seq_len / grid.cp
        shorter = 1.0 + rates.kernels.attention_half_length / length
        forward = core * shorter / (peak * rates.kernels.attention_efficiency)
        attention = forward * np.where(core_again, 4.5, 3.5)
    else:
        # All scores are computed, and passed over: product, mask and softmax, dropout, product; about 40 bytes a score.
        scores = num_tokens * model.seq_len * model.num_heads / t
        attention = 2.0 * core * np.where(core_again, 4.0, 3.0) / reached
        attention += scores * np.where(core_again, 53.0, 40.0) / memory
        forward = attention / np.where(core_again, 4.0, 3.0)
    traffic = (
        num_tokens
        * _elementwise_bytes(model, grid, recipe)
        * recipe.activations.element_bytes
        / 2.0
        * np.where(full | some, 1.4, 1.0)
    )
    traffic = traffic + num_tokens * again["moved"] / t
    if recipe.adapter_rank:
        # Forward, an adapter reads its input, writes its output and adds it (4 outputs in all); backward, it reads the
        # output's gradient twice and the input, and writes and adds the input's gradient (4 inputs).
        traffic = traffic + 6.0 * num_tokens * model.adapted_widths * recipe.activations.element_bytes / t
    if recipe.frozen_bytes is not None:
        # Forward, backward and where it is repeated, a weight is read and written in 16 bits before its product.
        made = weights * (recipe.frozen_bytes + recipe.activations.element_bytes)
        traffic = traffic + made * (2.0 + np.where(full, 1.0, 0.0))
    # Unfused, a weight's gradient is written, read and added to the one that is held.
    written = 0.0 if recipe.activations.fused_elementwise else 8.0
    own = (
        adapters
        if recipe.adapter_rank
        else weights - model.routed_weights / t + model.expert_parameters / (grid.ep * grid.etp)
    )
    accumulate = own * (written + 2.0 * recipe.states.gradient_bytes)
    whole = num_tokens * model.hidden * recipe.activations.element_bytes
    one = tensor_collective_seconds(grid, whole, rates, gpu.gpus_per_node)
    backward = _BACKWARD_GATHERS - 2.0 * recipe.wire.hides_backward_gathers
    gathers = np.where(grid.sequence_parallel, _FORWARD_GATHERS + backward, 4.0)
    gathers = gathers + np.where(full, _FORWARD_GATHERS, again["collectives"] / 2.0)
    scatters = np.where(grid.sequence_parallel, 2.0 * _SCATTERS, 4.0)
    skipped = 1.0 if recipe.activations.skips_last_product else 0.0
    scatters = scatters + np.where(full, _SCATTERS - skipped, again["collectives"] / 2.0)
    narrow = recipe.products is not None and recipe.wire.gathers_narrow
    gathered = np.where(grid.sequence_parallel & narrow, _narrow_bytes(recipe) / recipe.activations.element_bytes, 1.0)
    collectives = gathers * tensor_collective_seconds(grid, whole * gathered, rates, gpu.gpus_per_node) + scatters * one
    block = num_tokens * model.kv_hidden * recipe.activations.element_bytes / t
    computed = AttentionTime(total=attention, forward=forward, again=core_again)
    ring = ring_attention_seconds(grid, block, computed, rates, gpu.gpus_per_node)
    floor = _floor_seconds(grid, gathers + scatters, rates, gpu.gpus_per_node)
    return {
        "matmul": matmul,
        "attention": attention,
        "elementwise": (traffic + accumulate + num_tokens * _cast_bytes(model, grid, recipe)) / memory,
        "tensor_communication": collectives * (1.0 - rates.network.tensor_overlap),
        "context_communication": ring,
        "expert_communication": expert_seconds(grid, whole / t, model.dispatched, rates, gpu.gpus_per_node)
        * np.where(full | grid.repeats(RecomputeModule.MOE), 1.5, 1.0),
        "floor": np.where(t > 1, floor, 0.0),
        "collective": one,
    }


def _repeated_modules(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> dict[str, Column]:
    """Return what the modules that a layer repeats add up to, by field of `Repeated`."""
    found = {name: np.zeros(len(grid)) for name in ("weights", "routed_weights", "moved", "collectives")}
    if grid.recompute_modules.any():
        for module in MODULES:
            one = repeated(model, recipe, module)
            for name, column in found.items():
                column += np.where(grid.repeats(module), getattr(one, name), 0.0)
    return found


def _offload_seconds(
    model: ModelSpec, grid: Grid, layer: dict[str, Column], gpu: Gpu, recipe: TrainingRecipe
) -> Column:
    """Return the seconds that a layer waits for its activations to leave, and to come back.

    They leave while the next layer's forward pass is computed, and come back during a backward pass, over the link to
    the host, which reaches `REACHED` of its bandwidth. A forward pass takes a third of a layer's time.
    """
    if not grid.offload_layers.any() or gpu.host is None:
        return np.zeros(len(grid))
    moved = layer_activation_bytes(model, grid, recipe) / (REACHED * gpu.host.bandwidth)
    computed = sum((column for name, column in layer.items() if name in STAGE_PARTS), start=np.zeros(len(grid)))
    forward, backward = computed / 3.0, computed * 2.0 / 3.0
    waits: Column = np.maximum(moved - forward, 0.0) + np.maximum(moved - backward, 0.0)
    return waits


def _linear_seconds(products: Column, model: ModelSpec, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Column:
    """Return the time of a block's linear layers.

    Products in 8 or 4 bits reach a share of their peak, relative to products in 16 bits, that was measured on the best
    shapes. The time beyond arithmetic, which matters most in narrow models, stays the same. For products in 4 bits the
    speed-up over 16 bits is the measured one of whole products, if there is one.
    """
    wide = gpu.peak(recipe.arithmetic) * rates.kernels.gemm_efficiency
    beyond = rates.kernels.gemm_half_width / model.hidden
    in_16_bits = products * (1.0 + beyond) / wide
    if recipe.products is None:
        return in_16_bits
    if recipe.products.arithmetic == "fp4" and gpu.fp4_gain:
        return in_16_bits / gpu.fp4_gain
    known = gpu if gpu.matmul_share and gpu.fp8_share else _H100
    share = (known.fp8_share or 1.0) / (known.matmul_share or 1.0)
    narrow = gpu.peak(recipe.products.arithmetic) * rates.kernels.gemm_efficiency * share
    times = _BLOCK_SCALED if recipe.products.name == "mxfp8" else 1.0
    return times * (products / narrow + products * beyond / wide)


def _narrow_bytes(recipe: TrainingRecipe) -> float:
    """Return the bytes of a product's input as the product reads it."""
    return recipe.products.num_bytes if recipe.products else recipe.activations.element_bytes


def _cast_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column | float:
    """Return bytes per token to cast the inputs of a layer's four products, and the gradients of their outputs."""
    if recipe.products is None:
        return 0.0
    gated = 1.0 if model.family == "gpt" else 2.0
    inputs = (3.0 + model.dispatched) * model.hidden + model.active_ffn
    outputs = (3.0 + model.dispatched) * model.hidden + 2.0 * model.kv_hidden + gated * model.active_ffn
    read_again = _FURTHER_READS.get(recipe.products.name, 0.0) * recipe.activations.element_bytes
    return (recipe.products.cast_bytes + read_again) * (inputs + outputs) / grid.tp


def _gemm_efficiency(model: ModelSpec, rates: Rates) -> float:
    return rates.kernels.gemm_efficiency * model.hidden / (model.hidden + rates.kernels.gemm_half_width)


def _floor_seconds(grid: Grid, num_collectives: Column, rates: Rates, gpus_per_node: int) -> Column:
    """Return the minimum time of a layer, however few tokens it gets.

    It consists of launches and, in a pipeline across nodes, of a stall for each tensor-parallel rank. Only collectives
    inside a node can hide in the stall; of those across nodes, the latency counts.
    """
    across = (grid.pp > 1) & (grid.num_gpus > gpus_per_node)
    latency = tensor_collective_seconds(grid, np.zeros(len(grid)), rates, gpus_per_node)
    shown = np.where(grid.tp > gpus_per_node, num_collectives * latency, 0.0)
    stalled = np.where(across, rates.floors.pipeline_stall_seconds * grid.tp + shown, 0.0)
    floor: Column = (
        np.where(grid.pp > 1, rates.floors.pipeline_floor_seconds, rates.floors.layer_floor_seconds) + stalled
    )
    return floor


def _elementwise_bytes(model: ModelSpec, grid: Grid, recipe: TrainingRecipe) -> Column:
    """Return bytes per token that a layer's element-wise kernels read and write, forward and backward.

    GPT with Megatron's fused kernels: norms, dropout with residual, GELU. LLaMA: norms, residuals, rotary positions,
    the copies that order q, k and v for the attention kernel, and an unfused gate. What lies between the parallel
    regions is divided by t only with sequence parallelism.

    Fused, in 16 bits: two norms read and write in the forward pass (4 per value); in the backward pass they read the
    input and its gradient and write another (8, with the statistics). Two residual sums take 6 and 6. The rotation of
    queries and keys takes 8 per value. A gate reads two and writes one, and in the backward pass reads three and
    writes two (16); without a gate, 4 and 6.
    """
    between = np.where(grid.sequence_parallel, grid.tp, 1)
    if recipe.activations.fused_elementwise:
        rotated = 0.0 if model.family == "gpt" else 8.0 * (model.hidden + model.kv_hidden)
        activated = (10.0 if model.family == "gpt" else 16.0) * model.active_ffn
        # Tokens are put in the order of their experts and back, each read and written, and so are their gradients.
        routed = 16.0 * model.dispatched * model.hidden
        return (24.0 + 12.0 * model.layer_norms) * model.hidden / between + (rotated + activated + routed) / grid.tp
    if model.family == "gpt":
        return 44.0 * model.hidden / between + 10.0 * model.ffn_hidden / grid.tp
    return (16.0 + 12.0 * model.layer_norms) * model.hidden / between + (
        84.0 * model.hidden + 33.0 * model.active_ffn + 16.0 * model.dispatched * model.hidden
    ) / grid.tp


def _head_seconds(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> dict[str, Column]:
    """Return the parts of the head and, separately, of the loss for one micro-batch."""
    memory = gpu.memory_bandwidth * rates.kernels.memory_efficiency
    weights = model.vocab_size * model.hidden / grid.tp
    logits = tokens(model, grid) * model.vocab_size / grid.tp
    times = 4.0 if recipe.adapter_rank else 6.0
    matmul = times * tokens(model, grid) * weights / (gpu.peak(recipe.arithmetic) * _gemm_efficiency(model, rates))
    return {
        "matmul": matmul,
        "elementwise": weights * (0.0 if recipe.adapter_rank else 16.0) / memory,
        "loss": logits * recipe.activations.moved_logit_bytes / memory,
        "logits": logits,
    }


def _stage_seconds(
    grid: Grid, stage: Stage, neighbours: int, pieces: _Pieces, gpu: Gpu, rates: Rates
) -> dict[str, Column]:
    """Return the parts of one micro-batch on one stage. The larger of `device` and `floor` bounds its time."""
    n, zero, head = float(stage.num_layers), np.zeros(len(grid)), pieces.head
    layer = pieces.layer
    if pieces.plain is not layer:  # only some of the stage's layers are repeated
        share = np.where(grid.recompute_layers > 0, repeated_layers(grid, stage) / max(n, 1.0), 1.0)
        layer = {name: share * column + (1.0 - share) * pieces.plain[name] for name, column in layer.items()}
    embedding = pieces.embedding if stage.has_embedding else zero
    head_seconds, loss_seconds = float(stage.has_head) * head["elementwise"], float(stage.has_loss) * head["loss"]
    parts = {
        "matmul": n * layer["matmul"] + float(stage.has_head) * head["matmul"],
        "attention": n * layer["attention"],
        "elementwise": n * layer["elementwise"] + embedding + head_seconds + loss_seconds,
        "tensor_communication": n * layer["tensor_communication"] + 2.0 * stage.has_head * layer["collective"],
        "context_communication": n * layer["context_communication"],
        "expert_communication": n * layer["expert_communication"],
        "activation_offload": np.minimum(grid.offload_layers, stage.num_layers) * pieces.offloaded,
    }
    device = sum(parts.values(), start=zero)
    floor = n * layer["floor"]
    sent = pieces.sent_bytes * grid.virtual_stages
    p2p = 2.0 * neighbours * point_to_point_seconds(grid, sent, rates, gpu.gpus_per_node)
    p2p = np.where((grid.virtual_stages > 1) & pieces.hides_sends, np.maximum(p2p - device, 0.0), p2p)
    if stage.has_loss != stage.has_head:
        # Logits go one way while the gradients of others come back, and both while the stages compute.
        logits = point_to_point_seconds(grid, pieces.logit_bytes, rates, gpu.gpus_per_node)
        p2p = p2p + np.maximum(logits - device, 0.0)
    wait = np.maximum(floor - device, 0.0)
    return {**parts, "launch_floor": wait, "point_to_point": p2p + zero, "device": device, "floor": floor}
