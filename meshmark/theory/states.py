"""What the planner's `memory` says of one rank of one case: the form in which the suites hold it to measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute, Schedule
from meshmark.spec.model_spec import ModelSpec
from meshmark.spec.precision import Precision
from meshmark.theory.grid import layout_grid
from meshmark.theory.memory import stage_memory
from meshmark.theory.overheads import Overheads
from meshmark.theory.parameters import stage_parameters
from meshmark.theory.partition import uniform_stages
from meshmark.theory.recipe import DEEPSPEED_PATHS, TrainingRecipe, eager_recipe


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of one rank."""

    parameters: float
    """Weights and masters."""
    gradients: float
    optimizer_states: float
    activations: float | None = None
    """When the step's first backward pass begins; None where they are not planned."""
    peak: float | None = None
    """The most of all at one instant, on the fullest rank of the stage; None where activations are not planned, and of
    DeepSpeed in mixed precision, whose copies the planner does not know."""


@dataclass(frozen=True, kw_only=True)
class Remainder:
    """Bytes that a framework really holds beyond (or, negative, short of) the closed form, and why."""

    category: str
    """parameters, gradients, optimizer_states, activations, or peak for what is there besides then."""
    num_bytes: float
    reason: str


def declared_bytes(declared: Sequence[Remainder], category: str) -> float:
    """Of one category; at the peak of all but gradients, which the recipe's path brings there."""
    here = ("parameters", "optimizer_states", "activations", "peak") if category == "peak" else (category,)
    return sum(r.num_bytes for r in declared if r.category in here)


def model_states(case: Case, rank: int, recipe: TrainingRecipe | None = None) -> ModelStates:
    """What `rank` must hold under `case`'s layout."""
    model, layout = case.workload.model, case.layout
    grid = layout_grid(layout, case.workload.global_batch)
    using = recipe or eager_recipe(case)
    held = stage_memory(model, grid, using, Overheads(), pipeline_stage(layout, rank))
    exact = _is_exact(case)
    known = case.precision in (Precision.FP32, Precision.FP64) or using.backward.gradient_path not in DEEPSPEED_PATHS
    return ModelStates(
        parameters=float(held.parameters[0]),
        gradients=float(held.gradients[0]),
        optimizer_states=float(held.optimizer[0]),
        activations=float(held.activations[0]) if exact else None,
        peak=float(held.total_bytes[0]) if exact and known and layout.recompute is Recompute.NONE else None,
    )


def _is_exact(case: Case) -> bool:
    """Whether activations have been held to what PyTorch saves: without dropout, selective recomputation (or any under
    autocast), sequence and context parallelism, and in a pipeline under GPipe's schedule alone (arXiv:1811.06965)."""
    layout, again = case.layout, case.layout.recompute
    wide = case.precision in (Precision.FP32, Precision.FP64)
    plain = again is Recompute.NONE or (again is Recompute.FULL and wide)
    plain = plain and layout.cp == 1 and not layout.sequence_parallel and case.workload.model.dropout == 0
    return plain and (layout.pp == 1 or layout.schedule is Schedule.GPIPE)


def pipeline_stage(layout: Layout, rank: int) -> int:
    return rank // (layout.tp * layout.dp * layout.cp)


def micro_batch_tokens(case: Case) -> int:
    """Of one rank."""
    layout, workload = case.layout, case.workload
    return workload.global_batch // (layout.dp * layout.num_micro_batches) * workload.model.seq_len


def local_parameters(model: ModelSpec, layout: Layout, rank: int) -> int:
    """Parameters that `rank` computes with: its pipeline stage's, its tensor-parallel shards; ZeRO not counted."""
    stage = uniform_stages(model, layout.pp)[pipeline_stage(layout, rank)]
    return int(stage_parameters(model, stage, layout.tp))
