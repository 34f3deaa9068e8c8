"""The number of parameters that a rank computes with."""

from __future__ import annotations

import numpy as np

from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.theory.grid import Column, Grid
from meshmark.theory.partition import Stage


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
