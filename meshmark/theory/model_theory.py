"""Closed forms of any model: what a rank holds and sends. A model family names its theory; see `ModelConfig`.

FLOPs of a training step have separate names for the conventions that the literature mixes. A multiply-add is two
operations. The backward pass does twice the matrix products of the forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from meshmark.import_target import class_at
from meshmark.models.config import ImageModelConfig, LayerSizes, ModelConfig
from meshmark.models.mixture import MixtureSpec
from meshmark.models.transformer import Family, ModelSpec
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute
from meshmark.spec.own_model import LayerCount, OwnModelConfig
from meshmark.spec.precision import Precision
from meshmark.theory.grid import Column, Grid
from meshmark.theory.partition import Stage, held_layers, held_stage, parameter_shapes, sent_on

# --- FLOPs of a training step.

Attention = Literal["full", "causal"]


def layer_matrix_parameters(model: ModelSpec) -> int:
    """Return the matrix weights of one layer. Norms and biases do no matrix products."""
    return round(model.layer_matrix_weights)


def model_flops_per_token(model: ModelSpec, *, attention: Attention = "full", adapter_rank: int = 0) -> float:
    """Return the FLOPs of the forward and backward pass of one token, without recomputation.

    It is 6 per matrix weight (including the head, excluding the embedding), and 12 s h per layer for the scores and
    their product with the values, or half of it if only the causal half counts. With full attention this is PaLM's
    count (arXiv:2204.02311 appendix B), and for a GPT that of arXiv:2205.05198 appendix A: 72 B L s h^2 (1 + s/6h +
    V/12hL). With LoRA's adapters, frozen weights have no gradients, and count 4 instead of 6 (arXiv:2106.09685).
    """
    weights = model.num_layers * layer_matrix_parameters(model) + model.vocab_size * model.hidden
    scores = 12.0 * model.num_layers * model.seq_len * model.attention_width * (0.5 if attention == "causal" else 1.0)
    if adapter_rank:
        return 4.0 * weights + 6.0 * model.num_layers * adapter_rank * model.adapted_widths + scores
    return 6.0 * weights + scores


def hardware_flops_per_token(model: ModelSpec, *, recompute: str, attention: Attention = "full") -> float:
    """Return the FLOPs per token that the device computes, including recomputation.

    `full` repeats the forward pass of the layers (not of the head), `selective` that of the attention core; see
    arXiv:2205.05198 appendix A and arXiv:2104.04473 eq. (3).
    """
    flops = model_flops_per_token(model, attention=attention)
    half = 0.5 if attention == "causal" else 1.0
    core = 4.0 * model.num_layers * model.seq_len * model.attention_width * half
    if recompute == "full":
        return flops + 2.0 * model.num_layers * layer_matrix_parameters(model) + core
    return flops + (core if recompute == "selective" else 0.0)


# --- Parameters of a rank.


def stage_parameters(model: ModelSpec, stage: Stage, tp: Column | int = 1) -> Column:
    """Return the parameters of one stage on one tensor-parallel rank.

    Matrices, biases of column-parallel ones and the vocabulary are split (arXiv:1909.08053 sec. 3). Norms, biases of
    row-parallel ones and learned positions are whole. The first and the last stage both hold a tied weight; if they
    are the same stage, it counts once.
    """
    # Experts are counted by `stage_experts`.
    h, is_gpt = model.hidden, model.family is Family.GPT
    whole, norm = (6 * h, 2 * h) if is_gpt else (2 * h, h)
    vocabulary = model.vocab_size * h / np.asarray(tp)
    block = model.block_parameters - model.expert_parameters
    total: Column = stage.num_layers * ((block - whole) / np.asarray(tp) + whole)
    if stage.has_embedding:
        total = total + vocabulary + (model.seq_len * h if is_gpt else 0)
    if stage.has_head:
        total = total + norm + (0 if model.tied_embeddings and stage.has_embedding else vocabulary)
    return total


def stage_adapters(model: ModelSpec, stage: Stage, rank: int, tp: Column | int = 1) -> Column:
    """Return the parameters of one stage's LoRA adapters on one tensor-parallel rank.

    Each is two matrices, in x rank and rank x out, and both are divided (Megatron-Bridge's `ParallelLinearAdapter`).
    """
    found: Column = stage.num_layers * rank * model.adapted_widths / np.asarray(tp).astype(float)
    return found


def stage_experts(model: ModelSpec, stage: Stage, grid: Grid) -> Column:
    """Return the parameters of one stage's experts on one rank: divided over experts' ranks and their own tensor
    ranks, not over those of attention.
    """
    held: Column = stage.num_layers * model.expert_parameters / (grid.ep * grid.etp).astype(float)
    return held


# --- Closed forms of any model: what a rank holds and sends. A model family names its theory; see `ModelConfig`.


class UnknownTheory:
    """Theory of a model about which nothing is known. Every answer is None, which suites report as *not planned*."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    @property
    def transformer(self) -> ModelSpec | None:
        """The transformer over tokens whose formulas for activations apply to this model, or None."""
        return None

    @property
    def stream(self) -> ModelSpec | None:
        """The transformer whose residual stream has the size of this model's, or None."""
        return None

    def num_parameters(self, layout: Layout, rank: int) -> int | None:
        """Return how many parameters `rank` computes with: those of its pipeline stage and tensor-parallel shard."""
        return None

    def trained_and_frozen(self, layout: Layout, rank: int) -> tuple[int, int] | None:
        """Return how many parameters `rank` trains, and how many it computes with and never updates."""
        count = self.num_parameters(layout, rank)
        return None if count is None else (count, 0)

    def num_tensors(self, layout: Layout, rank: int) -> int | None:
        """Return the number of tensors that these parameters are in."""
        return None

    def plans_traffic(self, layout: Layout) -> bool:
        """Return whether it is known how often weights are gathered under ZeRO-3."""
        return True

    def boundary_numbers(self, num_stages: int, boundary: int) -> int | None:
        """Return the number of values per row that cross the boundary after a pipeline stage."""
        return None

    def tensor_parallel_sends(self, case: Case, rank: int, step: int) -> tuple[tuple[str, int, int], ...] | None:
        """Return kind, bytes and calls of what modules send over tensor-parallel ranks, if they are counted.

        None if a formula gives them.
        """
        return None

    def table_bytes(self, layout: Layout, rank: int, precision: Precision) -> float:
        """Return the bytes of tables and buffers, such as rotary positions and running statistics."""
        return 0.0

    def activation_bytes(self, case: Case, rank: int, step: int, *, casts_weights: bool) -> float | None:
        """Return what autograd keeps of the first micro-batch of `step`, if it is counted and not computed."""
        return None

    def kept_bytes(self, case: Case, rank: int, step: int, *, casts_weights: bool) -> float:
        """Return the bytes of values that the model's modules keep as attributes after `step`."""
        return 0.0

    def recomputed_gathers(self) -> tuple[tuple[int, int], ...]:
        """Return extra gathers under PyTorch's checkpointing of blocks, as pairs of (elements, extra times)."""
        return ()

    def bucket_elements(self) -> int:
        """Return the elements of the larger of a block and the embedding, the most that a bucket holds."""
        return max(self.model.block_parameters, self.model.embedding_parameters)

    def flops_per_unit(self) -> float | None:
        """Return the FLOPs of a forward and backward pass of one token, or of one image, without recomputation."""
        return None


class TransformerTheory(UnknownTheory):
    """GPTs, LLaMAs, and encoders of the same blocks."""

    model: ModelSpec

    @property
    def transformer(self) -> ModelSpec:
        return self.model

    @property
    def stream(self) -> ModelSpec:
        return self.model

    def num_parameters(self, layout: Layout, rank: int) -> int:
        return int(stage_parameters(self.model, held_stage(self.model, layout, rank), layout.tp))

    def num_tensors(self, layout: Layout, rank: int) -> int:
        return len(parameter_shapes(self.model, held_stage(self.model, layout, rank)))

    def boundary_numbers(self, num_stages: int, boundary: int) -> int:
        return self.model.seq_len * self.model.hidden

    def table_bytes(self, layout: Layout, rank: int, precision: Precision) -> float:
        """Rotary positions: a cosine and a sine per token for half of a head's width, in at least float32.

        See arXiv:2104.09864, eq. 15.
        """
        if self.model.family is not Family.LLAMA:
            return 0.0
        return self.model.seq_len / layout.cp * self.model.head_dim * max(precision.compute.itemsize, 4)

    def recomputed_gathers(self) -> tuple[tuple[int, int], ...]:
        """All of a block but its last product, which the backward pass has gathered when the block runs again."""
        shapes = parameter_shapes(self.model, Stage(num_layers=self.model.num_layers))
        return tuple((math.prod(shape), 1) for name, shape in shapes.items() if ".feed_forward.down." not in name)

    def bucket_elements(self) -> int:
        return max(self.model.block_parameters, self.model.vocab_size * self.model.hidden)

    def flops_per_unit(self) -> float:
        return model_flops_per_token(self.model)


class MixtureTheory(UnknownTheory):
    """A GPT with experts. It is unknown how its layers are split."""

    model: MixtureSpec

    @property
    def stream(self) -> ModelSpec:
        return self.model.dense

    def num_parameters(self, layout: Layout, rank: int) -> int | None:
        if layout.tp * layout.cp > 1:
            return None
        held = held_stage(self.model.dense, layout, rank)
        ends = held.has_embedding * self.model.embedding_parameters + held.has_head * self.model.head_parameters
        return held.num_layers * self.model.block_parameters + ends

    def num_tensors(self, layout: Layout, rank: int) -> int:
        held = held_stage(self.model.dense, layout, rank)
        return 2 * held.has_embedding + held.num_layers * self.model.block_tensors + 3 * held.has_head

    def boundary_numbers(self, num_stages: int, boundary: int) -> int:
        return self.model.seq_len * self.model.hidden

    def flops_per_unit(self) -> float:
        return 3.0 * self.model.forward_flops


class LayeredTheory(UnknownTheory):
    """Image models, which report the sizes of their layers. It is unknown how a layer is split."""

    model: ImageModelConfig

    def _held(self, layout: Layout, rank: int) -> list[LayerSizes]:
        return held_layers(self.model, layout, rank)

    def num_parameters(self, layout: Layout, rank: int) -> int | None:
        if layout.tp * layout.cp > 1:
            return None
        return sum(layer.num_parameters for layer in self._held(layout, rank))

    def num_tensors(self, layout: Layout, rank: int) -> int:
        return sum(layer.num_tensors for layer in self._held(layout, rank))

    def boundary_numbers(self, num_stages: int, boundary: int) -> int:
        return sent_on(self.model, num_stages, boundary)

    def table_bytes(self, layout: Layout, rank: int, precision: Precision) -> float:
        """Buffers of batch norms: two running statistics per channel, in at least float32, and a count of batches."""
        if not self.model.couples_rows:
            return 0.0
        norms = [width for layer in self._held(layout, rank) for width in layer.normed]
        return sum(2 * max(precision.compute.itemsize, 4) * width + 8 for width in norms)

    def flops_per_unit(self) -> float:
        return 3.0 * self.model.forward_flops


class CountedTheory(UnknownTheory):
    """Models whose parameters are counted, and whose saved tensors are counted in a pass of one plain process."""

    model: OwnModelConfig

    def num_parameters(self, layout: Layout, rank: int) -> int | None:
        """Return the parameters that a rank holds; None if unknown. Traffic with frozen parameters is not planned: it
        assumes gradients of all parameters."""
        model = self.model
        if layout.cp > 1 or model.has_frozen or layout.tp * layout.pp > max(layout.tp, layout.pp):
            return None
        if layout.pp > 1:
            return sum(layer.num_parameters for layer in self._held(layout, rank))
        split = model.split.num_parameters if model.split and layout.tp > 1 else 0
        return model.num_parameters - split + split // layout.tp

    def trained_and_frozen(self, layout: Layout, rank: int) -> tuple[int, int] | None:
        model = self.model
        if model.unused:  # frameworks differ in whether they hold gradients and states for these, and send zeros
            return None
        if not model.has_frozen:
            return super().trained_and_frozen(layout, rank)
        # Where a frozen parameter goes if the model is split or cut is not counted.
        known = model.num_frozen and layout.tp * layout.pp * layout.cp == 1
        return (model.num_parameters - model.num_frozen, model.num_frozen) if known else None

    def num_tensors(self, layout: Layout, rank: int) -> int | None:
        if layout.pp > 1:
            return sum(layer.num_tensors for layer in self._held(layout, rank))
        return self.model.num_tensors if layout.cp == 1 else None

    def _held(self, layout: Layout, rank: int) -> list[LayerCount]:
        num_stages, stages = layout.pp * layout.virtual_stages, layout.stages_of(layout.coordinates(rank).pp)
        return [self.model.layers[i] for stage in stages for i in self.model.stage_layers(num_stages, stage)]

    def boundary_numbers(self, num_stages: int, boundary: int) -> int:
        return self.model.layers[self.model.stage_layers(num_stages, boundary)[-1]].outputs

    def plans_traffic(self, layout: Layout) -> bool:
        """Unplanned cases depend on how often a framework gathers weights.

        If a block runs several times, a framework may gather it each time or keep it. It is also unknown how often
        recomputed modules gather when values choose between them. Some frameworks send zeros as the gradients of
        parameters that the loss does not depend on, and some send nothing.
        """
        recomputes = layout.recompute is not Recompute.NONE
        unknown = layout.zero_stage == 3 and (self.model.repeats or (self.model.chooses and recomputes))
        return self._splits_as_planned(layout) and not unknown and not self.model.unused

    def table_bytes(self, layout: Layout, rank: int, precision: Precision) -> float:
        if layout.pp > 1:
            return sum(layer.buffer_bytes for layer in self._held(layout, rank))
        return self.model.buffer_bytes

    def activation_bytes(self, case: Case, rank: int, step: int, *, casts_weights: bool) -> float | None:
        """Not planned for other styles of a plan, which may keep other tensors, or for several chunks per rank, whose
        order differs.
        """
        if not self._is_counted(case.layout):
            return None
        counted: Callable[..., float | None] = class_at(self.model.dry_run)
        return counted(case, rank, step, casts_weights)

    def kept_bytes(self, case: Case, rank: int, step: int, *, casts_weights: bool) -> float:
        counted: Callable[..., float | None] = class_at(self.model.kept)
        return counted(case, rank, step, casts_weights) or 0.0 if self._is_counted(case.layout) else 0.0

    def _is_counted(self, layout: Layout) -> bool:
        return layout.virtual_stages == 1 and self._splits_as_planned(layout)

    def _splits_as_planned(self, layout: Layout) -> bool:
        return layout.tp == 1 or bool(self.model.split and self.model.split.is_planned)

    def tensor_parallel_sends(self, case: Case, rank: int, step: int) -> tuple[tuple[str, int, int], ...] | None:
        counted: Callable[..., tuple[tuple[str, int, int], ...]] = class_at(self.model.sends)
        return counted(case, rank, step)

    def recomputed_gathers(self) -> tuple[tuple[int, int], ...]:
        counted: Callable[..., tuple[tuple[int, int], ...]] = class_at(self.model.recomputed)
        return counted(self.model)

    def bucket_elements(self) -> int:
        return self.model.num_parameters


@functools.lru_cache(maxsize=64)
def theory_of(model: ModelConfig) -> UnknownTheory:
    """Return the closed forms that a model's family names."""
    found: UnknownTheory = class_at(model.theory)(model)
    return found


def local_parameters(model: ModelConfig, layout: Layout, rank: int) -> int | None:
    """Return how many parameters `rank` computes with, ignoring ZeRO, or None if that is not planned."""
    return theory_of(model).num_parameters(layout, rank)


def bucket_elements(model: ModelConfig) -> int:
    """Return the elements of the bucket that the suites configure for DeepSpeed.

    It is DeepSpeed's default of 500 million, but at most the larger of a block and the embedding, because a small
    model would never fill more.
    """
    return min(500_000_000, theory_of(model).bucket_elements())
