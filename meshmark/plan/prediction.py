"""Memory and time of a grid of layouts on one kind of machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from meshmark.models.transformer import ModelSpec
from meshmark.plan.rates import Rates
from meshmark.plan.stacks import Stack, stack_of
from meshmark.plan.step_time import StepTime, step_time
from meshmark.spec.hardware import Gpu
from meshmark.spec.layout import Recompute, RecomputeModule
from meshmark.theory.activations import repeated, skipped_weights
from meshmark.theory.grid import MODULES, RECOMPUTES, Column, Grid
from meshmark.theory.memory import Memory, memory
from meshmark.theory.model_theory import hardware_flops_per_token, model_flops_per_token
from meshmark.theory.recipe import TrainingRecipe

MEMORY_ERROR = 0.08
"""Mean relative error of memory on data that the rates were not fitted to. `make validate` fails above it."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions for every layout in a grid."""

    model: ModelSpec
    grid: Grid
    gpu: Gpu
    recipe: TrainingRecipe
    rates: Rates
    memory: Memory
    time: StepTime

    @property
    def stack(self) -> Stack:
        """The software stack that the recipe's frameworks run on."""
        return stack_of(self.recipe.name)

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s in the arithmetic of the matrix products, the narrow ones if there are any."""
        narrow = self.recipe.products
        return self.gpu.peak(narrow.arithmetic if narrow else self.recipe.arithmetic)

    @property
    def memory_bytes(self) -> Column:
        return self.memory.total_bytes

    @property
    def needed_bytes(self) -> Column:
        """Memory with which the allocator need not wait for queued collectives. Most runs that have to wait crash."""
        return self.memory_bytes + self.memory.released

    @property
    def host_headroom_bytes(self) -> Column:
        """Bytes left in a rank's share of its node's host memory or drives after offloading."""
        host = self.gpu.host
        # Activations go to host memory, also where no states do.
        offload = np.where((self.grid.offload == 0) & (self.grid.offload_layers > 0), 1, self.grid.offload)
        room = np.array([np.inf, host.memory_bytes if host else 0.0, host.nvme_bytes if host else 0.0])
        share: Column = room[offload] / np.minimum(self.grid.num_gpus, self.gpu.gpus_per_node)
        return share - self.memory.host_bytes

    @property
    def available_bytes(self) -> float:
        """GPU memory that is available to the framework's allocator, in bytes."""
        return _available(self.gpu, self.recipe)

    @property
    def headroom_bytes(self) -> Column:
        """Bytes left on a rank, or in its share of the host if that is tighter. Negative if it does not fit."""
        return np.minimum(self.available_bytes - self.needed_bytes, self.host_headroom_bytes)

    @property
    def fits(self) -> Column:
        """True where every rank has enough memory and every stage has a layer."""
        there: Column = self.headroom_bytes >= 0
        return there & (self.grid.pp * self.grid.virtual_stages <= self.recipe.cut.most_stages(self.model))

    @property
    def tight(self) -> Column:
        """True where it fits by less than the planner's own error. Similar runs have run out of memory."""
        return self.fits & (self.available_bytes - self.needed_bytes < MEMORY_ERROR * self.needed_bytes)

    @property
    def step_seconds(self) -> Column:
        return self.time.total_seconds

    @property
    def step_seconds_interval(self) -> tuple[Column, Column] | None:
        """Interval that should contain nine of ten runs. None if no run shows how wide it is.

        None does for mixtures of experts and for LoRA: the intervals are of runs that train dense models whole.
        """
        spread = self.rates.spread
        if spread.slower <= 1.0 or self.model.expert_parameters or self.recipe.adapter_rank:
            return None
        return self.step_seconds * spread.faster, self.step_seconds * spread.slower

    @property
    def tokens_per_second_per_gpu(self) -> Column:
        return self.grid.global_batch * self.model.seq_len / self.step_seconds / self.grid.num_gpus

    @property
    def mfu(self) -> Column:
        """Model FLOPs over peak, as in the reports of the suites (PaLM, arXiv:2204.02311 appendix B)."""
        flops = model_flops_per_token(self.model, adapter_rank=self.recipe.adapter_rank)
        return self.tokens_per_second_per_gpu * flops / self.peak_flops

    @property
    def hfu(self) -> Column:
        """Hardware FLOPs, including recomputation, over peak."""
        by_code = np.array([hardware_flops_per_token(self.model, recompute=r) for r in RECOMPUTES])
        trained = model_flops_per_token(self.model, adapter_rank=self.recipe.adapter_rank)
        by_code = by_code + trained - model_flops_per_token(self.model)
        skipped = 2.0 * self.model.num_layers * skipped_weights(self.model, self.recipe)
        by_code[RECOMPUTES.index(Recompute.FULL)] -= skipped
        flops, none = by_code[self.grid.recompute], by_code[RECOMPUTES.index(Recompute.NONE)]
        chunks, layers = self.grid.pp * self.grid.virtual_stages, self.model.num_layers
        share = np.minimum(self.grid.recompute_layers * chunks / layers, 1.0)
        flops = np.where(self.grid.recompute_layers > 0, none + share * (flops - none), flops)
        if self.grid.recompute_modules.any():
            named = np.full(len(self.grid), none)
            for module in MODULES:
                weights = repeated(self.model, self.recipe, module).weights
                core = by_code[RECOMPUTES.index(Recompute.SELECTIVE)] - none
                more = core if module is RecomputeModule.CORE_ATTN else 2.0 * layers * weights
                named += np.where(self.grid.repeats(module), more, 0.0)
            flops = np.where(self.grid.recompute_modules > 0, named, flops)
        found: Column = self.tokens_per_second_per_gpu * flops / self.peak_flops
        return found


def _available(gpu: Gpu, recipe: TrainingRecipe) -> float:
    """Return the memory that a framework can allocate: all but that of CUDA and NCCL, which TPUs do not use."""
    return gpu.memory_bytes - (0.0 if gpu.is_tpu else recipe.buffers.outside_bytes)


def predict_grid(model: ModelSpec, grid: Grid, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Prediction:
    """Predict every layout of `grid`."""
    time = step_time(model, grid, gpu, recipe, rates)
    capacity = _available(gpu, recipe)
    held = memory(model, grid, recipe, rates.memory, lag=time.lag, capacity_bytes=capacity)
    if rates.polling.pipeline_wait_seconds:
        # The build that polls cuts pipelines as its source says, which counts the head as a whole layer.
        whole = dataclasses.replace(recipe, cut=dataclasses.replace(recipe.cut, head_share=1.0))
        polled = memory(model, grid, whole, rates.memory, lag=time.lag, capacity_bytes=capacity)
        held = Memory(
            **{
                field.name: np.where(time.message_wait > 0.0, getattr(polled, field.name), getattr(held, field.name))
                for field in dataclasses.fields(Memory)
            }
        )
    return Prediction(model=model, grid=grid, gpu=gpu, recipe=recipe, rates=rates, memory=held, time=time)
