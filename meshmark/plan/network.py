"""Time of collectives: which links a group crosses, a latency per step of the ring, bytes over bandwidth."""

from __future__ import annotations

import numpy as np

from meshmark.plan.grid import Column, Grid
from meshmark.plan.rates import Rates


def tensor_collective_seconds(grid: Grid, whole_bytes: Column, rates: Rates, gpus_per_node: int) -> Column:
    """One all-gather or reduce-scatter of `whole_bytes` over the tensor-parallel ranks.

    A ring takes t - 1 steps and moves (t - 1)/t of the bytes; inside a node the steps cost one latency together.
    """
    t = grid.tp
    inside = t <= gpus_per_node
    latency = np.where(inside, rates.tp_latency_seconds, rates.hop_seconds * (t - 1))
    bandwidth = np.where(inside, rates.tp_bandwidth, rates.tp_network_bandwidth)
    return np.where(t > 1, latency + whole_bytes * (t - 1) / t / bandwidth, 0.0)


def data_collective_seconds(
    grid: Grid, num_parameters: Column, bytes_per_parameter: float, rates: Rates, gpus_per_node: int
) -> Column:
    """One data-parallel collective of `num_parameters` a rank, latency apart.

    Ranks of a group inside a node reduce there first; a node then sends (n - 1)/n of the bytes to the other n - 1, once
    for each of its groups, and all groups share the node's adapters.
    """
    shards = grid.dp * grid.cp
    members = np.clip(gpus_per_node // np.minimum(grid.tp, gpus_per_node), 1, shards)
    nodes = np.maximum(1.0, shards / members)
    moved = num_parameters * bytes_per_parameter
    inside = moved * (shards - 1) / shards / rates.tp_bandwidth
    across = moved * (gpus_per_node / members) * (nodes - 1.0) / nodes / rates.node_bandwidth
    return np.where(shards > 1, np.where(nodes > 1, across, inside), 0.0)


def crosses_nodes(grid: Grid, gpus_per_node: int) -> Column:
    """Whether the data-parallel groups span nodes."""
    members = np.maximum(gpus_per_node // np.minimum(grid.tp, gpus_per_node), 1)
    spans: Column = grid.dp * grid.cp > members
    return spans


def point_to_point_seconds(grid: Grid, sent_bytes: Column, rates: Rates, gpus_per_node: int) -> Column:
    """One send from a pipeline stage to the next, over the network unless one node holds the whole job."""
    bandwidth = np.where(grid.num_gpus > gpus_per_node, rates.p2p_bandwidth, rates.tp_bandwidth)
    return np.where(grid.pp > 1, sent_bytes / bandwidth, 0.0)
