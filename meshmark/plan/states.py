"""Closed forms of what one rank holds: parameters, gradients, optimizer states; activations by `eager.py`."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.case import Case
from meshmark.layout import Layout, Precision
from meshmark.model_spec import Family, ModelSpec
from meshmark.plan.eager import held_activations


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Bytes that a framework keeps for every parameter, before any sharding.

    ZeRO's 16 bytes (arXiv:1910.02054, section 3.1) are weights 2, masters 4, gradients 2 and moments 8; frameworks
    that accumulate gradients in float32 keep 18; plain float32 AdamW keeps 16 too, as 4, 0, 4 and 8.
    """

    weights: int = 4
    """What forward and backward use; sharded from ZeRO stage 3 on."""
    masters: int = 0
    """Float32 copies that the optimizer updates; sharded from stage 1 on, with the optimizer states."""
    gradients: int = 4
    """Between backward and update; sharded from stage 2 on."""
    casts_weights: bool = False
    """A mixed precision runs norms and the residual stream in the low one too, in place of autocast."""

    @classmethod
    def plain(cls, precision: Precision, *, casts_weights: bool = False) -> Recipe:
        """Weights in the wide precision and nothing else; autocast makes its copies one operation at a time."""
        width = 8 if precision is Precision.FP64 else 4
        return cls(weights=width, gradients=width, casts_weights=casts_weights)


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of one rank."""

    parameters: float
    """Weights and masters."""
    gradients: float
    optimizer_states: float
    activations: float | None = None
    """When the step's first backward pass begins; None where they are not planned."""


@dataclass(frozen=True, kw_only=True)
class Remainder:
    """Bytes that a framework really holds beyond (or, negative, short of) the closed form, and why."""

    category: str
    """parameters, gradients, optimizer_states or activations."""
    num_bytes: float
    reason: str


def model_states(case: Case, rank: int, recipe: Recipe | None = None) -> ModelStates:
    """What `rank` must hold under `case`'s layout (arXiv:1910.02054, section 5)."""
    recipe = recipe or Recipe.plain(case.precision)
    layout, stage = case.layout, case.layout.zero_stage
    count = local_parameters(case.workload.model, layout, rank)
    moment = 8 if case.precision is Precision.FP64 else 4

    def share(from_stage: int) -> float:
        return count / (layout.dp * layout.cp if stage >= from_stage else 1)

    return ModelStates(
        parameters=recipe.weights * share(3) + recipe.masters * share(1),
        gradients=recipe.gradients * share(2),
        optimizer_states=moment * case.workload.optimizer.states_per_parameter * share(1),
        activations=held_activations(case, rank, casts_weights=recipe.casts_weights),
    )


def local_parameters(model: ModelSpec, layout: Layout, rank: int) -> int:
    """Parameters that `rank` computes with: its pipeline stage's, its tensor-parallel shards; ZeRO not counted."""
    stage = rank // (layout.tp * layout.cp * layout.dp)
    count = stage_layers(model, layout, stage) * block_shard(model, layout.tp)
    if stage == 0:
        positions = model.seq_len if model.family is Family.GPT else 0
        count += model.hidden * (model.vocab_size // layout.tp + positions)
    if stage == layout.pp - 1:
        norm = model.hidden * (2 if model.family is Family.GPT else 1)
        own_output = not model.tied_embeddings or layout.pp > 1
        count += norm + (model.vocab_size // layout.tp * model.hidden if own_output else 0)
    return count


def stage_layers(model: ModelSpec, layout: Layout, stage: int) -> int:
    """Blocks of a pipeline stage: spread evenly, the remainder on the first ones."""
    share, rest = divmod(model.num_layers, layout.pp)
    return share + (stage < rest)


def block_shard(model: ModelSpec, tp: int) -> int:
    """Parameters of one block on one tensor-parallel rank: matrices and the biases of column-parallel ones are split
    (arXiv:1909.08053, section 3), norms and the biases of row-parallel ones are whole."""
    h = model.hidden
    whole = 6 * h if model.family is Family.GPT else 2 * h
    return (model.block_parameters - whole) // tp + whole
