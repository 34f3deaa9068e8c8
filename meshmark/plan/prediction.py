"""Memory and time of a grid of layouts on one kind of machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from meshmark.plan.rates import Rates
from meshmark.plan.step_time import StepTime, step_time
from meshmark.spec.hardware import Gpu
from meshmark.spec.model_spec import ModelSpec
from meshmark.theory.flops import hardware_flops_per_token, model_flops_per_token
from meshmark.theory.grid import RECOMPUTES, Column, Grid
from meshmark.theory.memory import Memory, memory
from meshmark.theory.recipe import TrainingRecipe

MEMORY_ERROR = 0.08
"""Of memory, in the mean, on data that the rates were not fitted to: `make validate` fails where it is more."""


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
    def available_bytes(self) -> float:
        """What the framework's allocator can have of a GPU."""
        return self.gpu.memory_bytes - self.recipe.buffers.outside_bytes

    @property
    def headroom_bytes(self) -> Column:
        """What a rank's memory, or its share of the host's where that is tighter, has left; negative: it misses."""
        return np.minimum(self.available_bytes - self.needed_bytes, self.host_headroom_bytes)

    @property
    def fits(self) -> Column:
        """Whether every rank has memory enough, and every stage a layer."""
        there: Column = self.headroom_bytes >= 0
        return there & (self.grid.pp * self.grid.virtual_stages <= self.recipe.cut.most_stages(self.model))

    @property
    def tight(self) -> Column:
        """Whether it fits by less than the planner's own error: runs of the like have run out of memory."""
        return self.fits & (self.available_bytes - self.needed_bytes < MEMORY_ERROR * self.needed_bytes)

    @property
    def step_seconds(self) -> Column:
        return self.time.total_seconds

    @property
    def step_seconds_interval(self) -> tuple[Column, Column] | None:
        """Within which nine runs in ten are expected; None where no run says how wide it is."""
        spread = self.rates.spread
        if spread.slower <= 1.0:
            return None
        return self.step_seconds * spread.faster, self.step_seconds * spread.slower

    @property
    def tokens_per_second_per_gpu(self) -> Column:
        return self.grid.global_batch * self.model.seq_len / self.step_seconds / self.grid.num_gpus

    @property
    def mfu(self) -> Column:
        """Model FLOPs over peak, as the reports of the suites have it (PaLM, arXiv:2204.02311 appendix B)."""
        flops = model_flops_per_token(self.model)
        return self.tokens_per_second_per_gpu * flops / self.peak_flops

    @property
    def hfu(self) -> Column:
        """Hardware FLOPs, recomputation counted, over peak."""
        by_code = np.array([hardware_flops_per_token(self.model, recompute=r) for r in RECOMPUTES])
        share: Column = self.tokens_per_second_per_gpu * by_code[self.grid.recompute] / self.peak_flops
        return share


def predict_grid(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Prediction:
    """Predict every layout of `grid`."""
    time = step_time(model, grid, gpu, recipe, rates)
    capacity = gpu.memory_bytes - recipe.buffers.outside_bytes
    held = memory(model, grid, recipe, rates.memory, lag=time.lag, capacity_bytes=capacity)
    if rates.polling.pipeline_wait_seconds:
        # The build that polls cuts pipelines as its source says, the head counted whole.
        whole = dataclasses.replace(recipe, cut=dataclasses.replace(recipe.cut, head_share=1.0))
        polled = memory(model, grid, whole, rates.memory, lag=time.lag, capacity_bytes=capacity)
        held = Memory(
            **{
                field.name: np.where(time.message_wait > 0.0, getattr(polled, field.name), getattr(held, field.name))
                for field in dataclasses.fields(Memory)
            }
        )
    return Prediction(model=model, grid=grid, gpu=gpu, recipe=recipe, rates=rates, memory=held, time=time)
