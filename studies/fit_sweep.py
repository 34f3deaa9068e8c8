"""Fit a machine's rates to the measured rows of the 1B and 8B sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshmark.plan.layout_table import LayoutRows, batches
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rates import FloorRates, HostRates, KernelRates, NetworkRates, PollingRates, Rates
from meshmark.plan.rows import Row, number
from meshmark.plan.step_time import step_time
from meshmark.spec.hardware import GIB, gpu
from meshmark.theory.grid import Column
from meshmark.theory.memory import Overheads
from meshmark.theory.recipe import recipe
from studies.fit import fit_rates
from studies.papers import paper

TIME_BOUNDS = {
    "kernels.gemm_efficiency": (0.3, 0.9),
    "network.tp_latency_seconds": (5e-6, 2e-4),
    "network.tp_bandwidth": (1e11, 4.5e11),
    "network.hop_seconds": (1e-5, 2e-4),
    "network.tp_network_bandwidth": (5e10, 4.5e11),
    "floors.layer_floor_seconds": (5e-4, 2e-2),
    "floors.pipeline_floor_seconds": (5e-4, 2e-2),
    "floors.pipeline_stall_seconds": (1e-4, 1e-2),
    "network.node_bandwidth": (5e10, 8e11),
    "network.overlap": (0.05, 1.0),
    "network.copy_tensor_seconds": (1e-7, 1e-4),
    "network.tree_tensor_seconds": (1e-6, 1e-3),
    "host.step_seconds": (1e-3, 1e-1),
    "host.tp_step_seconds": (1e-4, 1e-1),
    "polling.pipeline_wait_seconds": (0.1, 2.0),
}
WAIT_BOUNDS = {name: TIME_BOUNDS[name] for name in ("polling.pipeline_wait_seconds", "floors.layer_floor_seconds")}
MEMORY_BOUNDS = {
    "memory.fragmentation": (1e-3, 0.3),
    "memory.queued_collectives": (1.0, 120.0),
    "memory.overhead_bytes": (1e7, 2e9),
}
PRIOR_WIDTH = 0.3
START = Rates(
    name="h100",
    kernels=KernelRates(gemm_half_width=331.0),  # as on the A100, where Megatron SC21's table 1 tells it
    network=NetworkRates(node_bandwidth=2.4e11, p2p_bandwidth=5e10, copy_tensor_seconds=5e-6, tree_tensor_seconds=1e-4),
    floors=FloorRates(layer_floor_seconds=4.4e-3, pipeline_floor_seconds=4e-3, pipeline_stall_seconds=2e-3),
    polling=PollingRates(pipeline_wait_seconds=0.6),
    host=HostRates(step_seconds=2e-2, tp_step_seconds=1e-2),
    memory=Overheads(fragmentation=0.03, queued_collectives=57.0, overhead_bytes=1e8),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Rows of one model that ran, with what was measured."""

    batch: LayoutRows
    step_seconds: Column
    memory_bytes: Column
    """Bytes that rank 0's allocator had reserved after the third step (`log_throughput` in nanotron's helpers.py)."""
    rows: list[Row]


def measured_sweep(model: str | None = None) -> list[Measured]:
    """The sweep's consistent rows that ran, by model; one model's when named."""
    table = [
        row
        for row in paper("ultrascale_sweep_1b_8b")
        if row["status"] == "ok" and not row["flag"] and model in (None, row["model"])
    ]
    return [measured(batch, table) for batch in batches(table)]


def measured(batch: LayoutRows, table: Sequence[Row]) -> Measured:
    """A batch with its measured columns."""
    rows = [table[i] for i in batch.rows]
    rate = np.array([number(row, "tokens_per_s_per_gpu") for row in rows])
    memory = np.array([number(row, "gpu_memory_gb") for row in rows])
    tokens = batch.grid.global_batch * batch.model.seq_len
    seconds = tokens / rate / batch.grid.num_gpus
    return Measured(batch=batch, step_seconds=seconds, memory_bytes=memory * GIB, rows=rows)


def predict_measured(one: Measured, given: Rates) -> Prediction:
    """The planner's view of measured rows."""
    batch = one.batch
    return predict_grid(batch.model, batch.grid, gpu(batch.gpu_name), recipe("nanotron"), given)


def predict_seconds(one: Measured, given: Rates) -> Column:
    """Return the steps' seconds alone: a fit of time asks for them hundreds of times, and memory takes longest."""
    batch = one.batch
    return step_time(batch.model, batch.grid, gpu(batch.gpu_name), recipe("nanotron"), given).total_seconds


def fit_sweep(parts: Sequence[Measured], origin: str) -> Rates:
    """Time first, then memory, which depends on time through the host's lag."""
    start = dataclasses.replace(START, origin=origin)

    def time_errors(given: Rates) -> Column:
        return np.concatenate([np.log(predict_seconds(p, given) / p.step_seconds) for p in parts])

    def memory_errors(given: Rates) -> Column:
        return np.concatenate(
            [np.log(predict_measured(p, given).memory.first_stage_bytes / p.memory_bytes) for p in parts]
        )

    # Part of the sweep's pipelines ran with a build that polls for messages (see reports/validation.md); which is not
    # in the table. From how many nodes and tensor-parallel ranks on is tried, and chosen by the mean error of the rows
    # fitted to.
    waiting = [
        fit_rates(
            start.moved(
                {
                    "polling.pipeline_wait_nodes": nodes,
                    "polling.pipeline_wait_dp": dp,
                    "polling.pipeline_wait_tp": tp,
                }
            ),
            WAIT_BOUNDS,
            time_errors,
        )
        for nodes in (32.0, 64.0)
        for dp in (1.0, 32.0)
        for tp in (32.0, 1e9)
    ]
    best = min(waiting, key=lambda given: float(np.abs(np.expm1(time_errors(given))).mean()))
    timed = fit_rates(best, TIME_BOUNDS, time_errors, prior_width=PRIOR_WIDTH)
    return fit_rates(timed, MEMORY_BOUNDS, memory_errors)
