"""Time of collectives: the links that a group crosses, latency per step of the ring, and bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.plan.rates import Rates
from meshmark.spec.hardware import Gpu
from meshmark.spec.layout import Offload
from meshmark.theory.grid import OFFLOADS, Column, Grid


def tensor_collective_seconds(grid: Grid, whole_bytes: Column, rates: Rates, gpus_per_node: int) -> Column:
    """Return the time of one all-gather or reduce-scatter of `whole_bytes` over the tensor-parallel ranks.

    A ring takes t - 1 steps and moves (t - 1)/t of the bytes. Inside a node, all steps together cost one latency. A
    ring that leaves the node also passes through the links inside it.
    """
    t = grid.tp
    inside = t <= gpus_per_node
    latency = np.where(inside, rates.network.tp_latency_seconds, rates.network.hop_seconds * (t - 1))
    across = min(rates.network.tp_network_bandwidth, rates.network.tp_bandwidth)
    bandwidth = np.where(inside, rates.network.tp_bandwidth, across)
    return np.where(t > 1, latency + whole_bytes * (t - 1) / t / bandwidth, 0.0)


@dataclass(frozen=True, kw_only=True)
class DataGroup:
    """Data-parallel ranks that take part in a collective together."""

    ranks: Column
    stride: Column | int = 1
    """Data-parallel ranks from one member to the next. More than one for replicas' ranks with the same shard."""


def ring_latency_seconds(grid: Grid, group: DataGroup, rates: Rates, gpus_per_node: int) -> Column:
    """Return the latency of one all-gather or reduce-scatter over data-parallel ranks.

    A ring of n ranks takes n - 1 steps, of which one for each other node leaves a node. However small its message is,
    it takes as long.
    """
    members = np.clip(gpus_per_node // np.minimum(grid.tp, gpus_per_node) // group.stride, 1, group.ranks)
    nodes = np.maximum(1.0, group.ranks / members)
    network = rates.network
    steps = (group.ranks - nodes) * network.ring_inside_seconds + (nodes - 1.0) * network.ring_across_seconds
    return np.where(group.ranks > 1, network.ring_start_seconds + steps, 0.0)


def data_collective_seconds(
    grid: Grid,
    num_parameters: Column,
    bytes_per_parameter: float,
    rates: Rates,
    gpus_per_node: int,
    group: DataGroup | None = None,
) -> Column:
    """Return the time of one data-parallel collective of `num_parameters` per rank, without latency.

    Ranks of a group inside a node reduce there first. A node then sends (n - 1)/n of the bytes to the other n - 1,
    once for each of its groups. All groups share the node's adapters. Without `group` all data-parallel ranks take
    part.
    """
    shards, stride = (group.ranks, group.stride) if group else (grid.data_ranks, 1)
    members = np.clip(gpus_per_node // np.minimum(grid.tp, gpus_per_node) // stride, 1, shards)
    nodes = np.maximum(1.0, shards / members)
    moved = num_parameters * bytes_per_parameter
    inside = moved * (shards - 1) / shards / rates.network.tp_bandwidth
    across = moved * (gpus_per_node / members) * (nodes - 1.0) / nodes / rates.network.node_bandwidth
    return np.where(shards > 1, np.where(nodes > 1, across, inside), 0.0)


def expert_seconds(grid: Grid, token_bytes: Column, chosen: float, rates: Rates, gpus_per_node: int) -> Column:
    """Return the time to send a rank's tokens to their `chosen` experts and back, forward and backward.

    `token_bytes` are those of one copy of each. A token goes to another node once, however many of its experts are
    there, over the rank's share of the network, and is copied within the node (DeepEP and HybridEP, Megatron-Core's
    dispatchers). Experts' ranks are neighbours. Tensor ranks of an expert gather its tokens and reduce its outputs.
    """
    ranks = grid.ep * grid.etp
    near = np.minimum(ranks, gpus_per_node)
    nodes = ranks / near
    network = rates.network
    sent_bytes = chosen * token_bytes
    inside = sent_bytes * (near - 1.0) / near / network.tp_bandwidth
    others = (nodes - 1.0) * (1.0 - (1.0 - 1.0 / nodes) ** chosen)
    across = token_bytes * others / (network.node_bandwidth / gpus_per_node)
    latency = np.where(ranks > near, network.hop_seconds, network.tp_latency_seconds)
    gathered = sent_bytes * (grid.etp - 1.0) / network.tp_bandwidth
    seconds: Column = 4.0 * (latency + np.maximum(inside, across) + gathered)
    return np.where((ranks > 1) & (sent_bytes > 0), seconds, 0.0)


def crosses_nodes(grid: Grid, gpus_per_node: int) -> Column:
    """Return whether the data-parallel groups span nodes."""
    members = np.maximum(gpus_per_node // np.minimum(grid.tp, gpus_per_node), 1)
    spans: Column = grid.dp * grid.cp > members
    return spans


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Compute time of one layer's attention on one micro-batch, in seconds."""

    total: Column
    """Forward and backward pass."""
    forward: Column
    """One forward pass."""
    again: Column
    """True where the backward pass repeats the forward pass."""


def ring_attention_seconds(
    grid: Grid, block_bytes: Column, attention: AttentionTime, rates: Rates, gpus_per_node: int
) -> Column:
    """Return the exposed communication of ring attention in one layer (arXiv:2310.01889 sec. 3).

    In each of cp - 1 hops a rank sends on its block of keys and of values, `block_bytes` each, while it computes with
    the current one. In the backward pass it also sends their gradients.
    """
    times = np.where(attention.again, 2.0, 1.0)
    there, back = (_ring_hop_seconds(grid, n * block_bytes, rates, gpus_per_node) for n in (2.0, 4.0))
    shown = shown_seconds(there, attention.forward / grid.cp, rates) * times
    shown = shown + shown_seconds(back, (attention.total - attention.forward * times) / grid.cp, rates)
    seconds: Column = (grid.cp - 1) * shown
    return seconds


def shown_seconds(seconds: Column, hidden: Column, rates: Rates) -> Column:
    """Return what communication adds to a step if `hidden` seconds of computation run beside it."""
    found: Column = np.maximum(seconds - hidden, 0.0) + rates.network.contention * np.minimum(seconds, hidden)
    return found


def _ring_hop_seconds(grid: Grid, sent_bytes: Column, rates: Rates, gpus_per_node: int) -> Column:
    """Return the time of one hop over the context-parallel ranks, which are numbered next to the tensor-parallel ones.

    If the ring leaves the node, the hop over the rank's own adapter is the slowest and counts.
    """
    inside = grid.tp * grid.cp <= gpus_per_node
    latency = np.where(inside, rates.network.tp_latency_seconds, rates.network.hop_seconds)
    seconds: Column = latency + sent_bytes / np.where(inside, rates.network.tp_bandwidth, rates.network.p2p_bandwidth)
    return seconds


def point_to_point_seconds(grid: Grid, sent_bytes: Column, rates: Rates, gpus_per_node: int) -> Column:
    """Return the time of one send to the next pipeline stage, over the network unless one node holds the whole job."""
    bandwidth = np.where(grid.num_gpus > gpus_per_node, rates.network.p2p_bandwidth, rates.network.tp_bandwidth)
    return np.where(grid.pp > 1, sent_bytes / bandwidth, 0.0)


def offload_bandwidth(grid: Grid, gpu: Gpu, rates: Rates) -> Column:
    """Return the bandwidth for a rank's offloaded states in bytes per second: the least of link, host and drives."""
    host = gpu.host
    from_host = min(rates.host.offload_bandwidth, host.bandwidth) if host else rates.host.offload_bandwidth
    from_drives = min(from_host, host.nvme_bandwidth / gpu.gpus_per_node) if host else from_host
    return np.where(grid.offload == OFFLOADS.index(Offload.NVME), from_drives, from_host)
