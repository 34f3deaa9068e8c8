"""Memory and time of a grid of layouts on one kind of machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.model_spec import ModelSpec
from meshmark.plan.flops import hardware_flops_per_token, model_flops_per_token
from meshmark.plan.grid import RECOMPUTES, Column, Grid
from meshmark.plan.memory import Memory, memory
from meshmark.plan.rates import Rates
from meshmark.plan.recipe import TrainingRecipe
from meshmark.plan.step_time import StepTime, step_time
from meshmark.plan.system import Gpu


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the planner says of every layout in a grid."""

    model: ModelSpec
    grid: Grid
    gpu: Gpu
    recipe: TrainingRecipe
    rates: Rates
    memory: Memory
    time: StepTime

    @property
    def peak_flops(self) -> float:
        """FLOP/s of the arithmetic that the matrix products run in."""
        return self.gpu.peak(self.recipe.arithmetic)

    @property
    def memory_bytes(self) -> Column:
        return self.memory.total_bytes

    @property
    def needed_bytes(self) -> Column:
        """Memory without the allocator having to wait for queued collectives: where it has to, most runs crash."""
        return self.memory_bytes + self.memory.released

    @property
    def host_headroom_bytes(self) -> Column:
        """What a rank's share of its node's host memory, or drives, has left of what is offloaded there."""
        host, offload = self.gpu.host, self.grid.offload
        room = np.array([np.inf, host.memory_bytes if host else 0.0, host.nvme_bytes if host else 0.0])
        share: Column = room[offload] / np.minimum(self.grid.num_gpus, self.gpu.gpus_per_node)
        return share - self.memory.host_bytes

    @property
    def headroom_bytes(self) -> Column:
        """What a rank's memory, or its share of the host's where that is tighter, has left; negative: it misses."""
        return np.minimum(self.gpu.memory_bytes - self.needed_bytes, self.host_headroom_bytes)

    @property
    def fits(self) -> Column:
        """Whether every rank has memory enough, and every stage a layer."""
        there: Column = self.headroom_bytes >= 0
        return there & (self.grid.pp * self.grid.virtual_stages <= self.model.num_layers)

    @property
    def step_seconds(self) -> Column:
        return self.time.total_seconds

    @property
    def tokens_per_second_per_gpu(self) -> Column:
        return self.grid.global_batch * self.model.seq_len / self.step_seconds / self.grid.num_gpus

    @property
    def mfu(self) -> Column:
        """Model FLOPs, causal attention counted in half, over peak."""
        flops = model_flops_per_token(self.model, attention="causal")
        return self.tokens_per_second_per_gpu * flops / self.peak_flops

    @property
    def hfu(self) -> Column:
        """Hardware FLOPs, recomputation counted, over peak."""
        by_code = np.array([hardware_flops_per_token(self.model, recompute=r, attention="causal") for r in RECOMPUTES])
        share: Column = self.tokens_per_second_per_gpu * by_code[self.grid.recompute] / self.peak_flops
        return share


def predict_grid(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Prediction:
    """Predict every layout of `grid`."""
    time = step_time(model, grid, gpu, recipe, rates)
    held = memory(model, grid, recipe, rates, lag=time.lag, capacity_bytes=gpu.memory_bytes)
    return Prediction(model=model, grid=grid, gpu=gpu, recipe=recipe, rates=rates, memory=held, time=time)
