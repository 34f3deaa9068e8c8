"""Time of the data-parallel collectives and the optimizer, which follow the backward passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.models.transformer import ModelSpec
from meshmark.plan.network import (
    DataGroup,
    crosses_nodes,
    data_collective_seconds,
    offload_bandwidth,
    ring_latency_seconds,
    shown_seconds,
)
from meshmark.plan.rates import Rates
from meshmark.spec.hardware import Gpu
from meshmark.spec.layout import Offload
from meshmark.theory.grid import OFFLOADS, Column, Grid
from meshmark.theory.recipe import TrainingRecipe

_MATRICES_PER_LAYER = 6.0
_BUCKET_BYTES = 25.0 * 2**20
"""Bytes of gradients that are reduced together: DDP's default, `bucket_cap_mb`."""
_SHARDED_BUCKET, _SHARDED_BUCKET_A_RANK = 4e7, 1e6
"""Parameters whose gradients are reduced together under ZeRO-1 and 2, at least, and for each data-parallel rank.

`bucket_size` of Megatron-Core's DistributedDataParallel.
"""


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """Parameters that data parallelism reduces on the heaviest pipeline stage, and the computation that overlaps it."""

    num_parameters: Column
    """Those that every data-parallel rank trains: all but experts, or adapters alone."""
    gathered: Column
    """Those that ZeRO-3 gathers."""
    experts: Column
    """Parameters of the experts on one rank."""
    embedding: Column
    """Parameters of the embedding, which gets its gradient last."""
    num_layers: int
    step_seconds: Column
    """Seconds of the passes of all micro-batches."""
    backward_seconds: Column
    """Seconds of the last micro-batch's backward pass."""


def data_seconds(grid: Grid, load: StageLoad, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Column:
    """Return the exposed data-parallel communication, by ZeRO stage."""

    same = DataGroup(ranks=grid.expert_shards * grid.replicas, stride=np.maximum(grid.ep * grid.etp // grid.tp, 1))
    within = DataGroup(ranks=grid.shards)
    among = DataGroup(ranks=grid.replicas, stride=grid.shards)

    def seconds(bytes_per_parameter: float, group: DataGroup | None = None, whole: Column | None = None) -> Column:
        whole, per_node = load.num_parameters if whole is None else whole, gpu.gpus_per_node
        found = data_collective_seconds(grid, whole, bytes_per_parameter, rates, per_node, group)
        if group is not among and load.experts.any():
            found = found + data_collective_seconds(grid, load.experts, bytes_per_parameter, rates, per_node, same)
        return found

    num_tensors = _MATRICES_PER_LAYER * load.num_layers + 2.0
    spans, shards = crosses_nodes(grid, gpu.gpus_per_node), grid.data_ranks
    buckets = np.ceil(load.num_parameters * recipe.wire.reduce_bytes / _BUCKET_BYTES)
    num_reductions = num_tensors if recipe.wire.reduces_by_tensor else np.minimum(num_tensors, buckets)
    tree = np.where(spans, rates.network.tree_tensor_seconds * np.log2(np.maximum(shards, 2)) * num_reductions, 0.0)
    copies = rates.network.copy_tensor_seconds * shards * num_tensors
    hidden = rates.network.overlap * load.backward_seconds
    # The embedding's gradient is the backward pass's last; nothing is left to hide its reduction behind.
    reduced = seconds(2.0 * recipe.wire.reduce_bytes)
    last = reduced * np.minimum(load.embedding / load.num_parameters, 1.0)
    # In a pipeline each stage's last backward pass waits for a gradient that the next stage sends after its own
    # reductions. Their latencies, one hop per rank, add up over the stages.
    hops = rates.network.hop_seconds * shards * num_tensors * grid.pp
    hops = np.where(spans & (grid.pp > 1) & recipe.wire.reduces_by_tensor, hops, 0.0)
    plain = shown_seconds(reduced - last + tree, hidden, rates) + last + hops
    ring, rings = (ring_latency_seconds(grid, group, rates, gpu.gpus_per_node) for group in (within, among))
    together = np.maximum(_SHARDED_BUCKET, _SHARDED_BUCKET_A_RANK * shards)
    count = np.where(grid.zero_stage == 3, load.num_layers + 1.0, np.ceil(load.num_parameters / together))
    scatter, gather = seconds(recipe.wire.reduce_bytes, within), seconds(recipe.wire.gather_bytes, within)
    # Replicas then all-reduce the shard that each of their ranks has.
    scatter = scatter + seconds(2.0 * recipe.wire.reduce_bytes, among) / grid.shards
    scatter = scatter + count * (ring + 2.0 * rings)
    if recipe.wire.reduces_under_zero1:
        sharded = reduced + gather + copies
    elif recipe.wire.shows_gathers:
        nodes = np.maximum(grid.shards * grid.tp / gpu.gpus_per_node, 1.0)
        chain = np.where(nodes > 1.0, rates.network.hop_seconds * nodes * num_tensors, 0.0)
        sharded = shown_seconds(scatter, hidden, rates) + gather + chain
    else:
        sharded = shown_seconds(scatter, hidden, rates) + shown_seconds(gather + count * ring, 0.5 * hidden, rates)
    # Weights are gathered for the forward and again for the backward pass of every micro-batch.
    weights = seconds(recipe.wire.gather_bytes, within, load.gathered) + count * ring
    everything = grid.num_micro_batches * (2.0 * weights + scatter)
    fully = shown_seconds(everything, rates.network.overlap * load.step_seconds, rates) + scatter / np.maximum(
        load.num_layers, 1
    )
    exposed = np.where(grid.zero_stage == 0, plain, np.where(grid.zero_stage <= 2, sharded, fully))
    return np.where(shards > 1, exposed, 0.0)


def tied_seconds(
    model: ModelSpec, grid: Grid, embedding: Column, gpu: Gpu, recipe: TrainingRecipe, rates: Rates
) -> Column:
    """Return the time to all-reduce a tied embedding's gradient between the first and the last stage.

    It follows everything else. Every GPU of a node sends its own gradient.
    """
    share = rates.network.node_bandwidth / gpu.gpus_per_node
    bandwidth = np.where(grid.num_gpus > gpu.gpus_per_node, share, rates.network.tp_bandwidth)
    return np.where((grid.pp > 1) & model.tied_embeddings, embedding * recipe.wire.reduce_bytes / bandwidth, 0.0)


def optimizer_seconds(
    grid: Grid, num_parameters: Column, gpu: Gpu, recipe: TrainingRecipe, rates: Rates, ranks: Column | None = None
) -> Column:
    """Return the time of the optimizer.

    Norm, clipping and zeroing read or write the gradients; the update reads and writes states, gradient and weights.
    """
    shards = grid.shards if ranks is None else ranks
    held = num_parameters / np.where(grid.zero_stage >= 2, shards, 1)
    updated = num_parameters / np.where(grid.zero_stage >= 1, shards, 1)
    states = recipe.states.master_bytes + recipe.states.moment_bytes
    moved = 4.0 * recipe.states.gradient_bytes * held + (2.0 * states + recipe.states.gradient_bytes + 6.0) * updated
    seconds = moved / (gpu.memory_bandwidth * rates.kernels.memory_efficiency)
    away = grid.offload != OFFLOADS.index(Offload.NONE)
    return seconds + np.where(away, 2.0 * states * updated / offload_bandwidth(grid, gpu, rates), 0.0)
