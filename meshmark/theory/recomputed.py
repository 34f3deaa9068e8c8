"""The memory that selective recomputation of one module saves, and its cost: Megatron-Core's `recompute_modules`.

A checkpointed module (`core_attn`, `mlp`, `moe`, `shared_experts`) keeps its input and nothing inside. Of the others
the output alone is dropped and made again (Megatron-Core's `CheckpointWithoutOutput`). A norm is repeated only where it
is a module of its own: `TELayerNormColumnParallelLinear` contains the norms of dense layers with grouped attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.errors import InputError
from meshmark.spec.layout import RecomputeModule
from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.theory.recipe import TrainingRecipe


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A module of one layer, by what repeating it changes. Bytes and weights are of one token, before division."""

    between: float = 0.0
    """Bytes no longer kept between tensor-parallel regions, which only sequence parallelism divides."""
    inside: float = 0.0
    """Bytes no longer kept inside of them, which tensor parallelism divides."""
    weights: float = 0.0
    """Matrix weights whose forward products are repeated."""
    routed_weights: float = 0.0
    """Those of them that belong to routed experts."""
    moved: float = 0.0
    """Bytes that its element-wise kernels read and write again."""
    collectives: float = 0.0
    """Tensor-parallel collectives that are repeated."""


def kept_product_bytes(recipe: TrainingRecipe) -> float:
    """Return the bytes of a value that a linear layer keeps as its input.

    Transformer Engine keeps the inputs of products in 8 bits as it casts them.
    """
    if recipe.products and recipe.activations.fused_elementwise:
        return recipe.products.num_bytes
    return recipe.activations.element_bytes


def gate_tensors(model: ModelSpec, recipe: TrainingRecipe) -> float:
    """Return the tensors of the inner width that a feed-forward network keeps: what a gate (or GELU) reads, and what
    the second product reads.

    A fused gate keeps its two inputs, and the product after it its own: SwiGLUFunction of Megatron-LM's
    core/fusions/fused_bias_swiglu.py.
    """
    if model.family is Family.GPT:
        return 2.0
    return 3.0 if recipe.activations.fused_elementwise else 4.0


def skipped_weights(model: ModelSpec, recipe: TrainingRecipe) -> float:
    """Return the weights of a layer whose products full recomputation does not repeat."""
    return model.hidden * model.active_ffn if recipe.activations.skips_last_product else 0.0


def repeated(model: ModelSpec, recipe: TrainingRecipe, module: RecomputeModule) -> Repeated:
    """Return what repeating `module` in every layer changes, on average over layers. Scores, which are not counted by
    width, are left to the caller. All zeros if the model has no such module.
    """
    h, width, product = model.hidden, recipe.activations.element_bytes, kept_product_bytes(recipe)
    matrices = 2.0 if model.family is Family.GPT else 3.0
    inner = (gate_tensors(model, recipe) - 1.0) * width + product  # bytes of each value of the inner width
    gate = 2.0 * width if model.family is Family.GPT else 3.0 * width  # bytes moved for each: read, and written
    routed, shared = model.routed_ffn, model.shared_experts_ffn
    dense = model.active_ffn - routed - shared
    has_dense, has_experts = 1.0 - model.routing_share, model.routing_share
    if module is RecomputeModule.MLP and has_dense:
        # Its first product holds the norm before it, whose output is thus kept no longer either.
        return Repeated(
            between=has_dense * product * h,
            inside=inner * dense,
            weights=(matrices - recipe.activations.skips_last_product) * h * dense,
            moved=gate * dense + has_dense * 2.0 * width * h,
            collectives=2.0 * has_dense,
        )
    if module is RecomputeModule.MOE and has_experts:
        # Tokens are put in the order of their experts and back, each read and written.
        sent = width * model.dispatched * h
        return Repeated(
            inside=inner * (routed + shared) + 2.0 * sent,
            weights=matrices * h * (routed + shared),
            routed_weights=model.routed_weights,
            moved=gate * (routed + shared) + 4.0 * sent,
        )
    if module is RecomputeModule.MOE_ACT:
        return Repeated(inside=product * routed, moved=gate * routed)
    if module is RecomputeModule.SHARED_EXPERTS:
        return Repeated(inside=inner * shared, weights=matrices * h * shared, moved=gate * shared)
    if module is RecomputeModule.LAYERNORM:
        norms = has_experts + (1.0 if model.latent_weights else 0.0)
        return Repeated(between=norms * product * h, moved=norms * 2.0 * width * h)
    if module is RecomputeModule.MLA_UP_PROJ:
        made = model.latent_outputs
        return Repeated(inside=width * made, weights=model.latent_weights, moved=2.0 * width * made)
    return Repeated()


def expect_modules(model: ModelSpec, modules: frozenset[RecomputeModule]) -> None:
    """Raise `InputError` for a module that the model has not got, or that another one contains."""
    has_experts = model.routing_share > 0.0
    there = {
        RecomputeModule.MLP: model.routing_share < 1.0,
        RecomputeModule.MOE: has_experts,
        RecomputeModule.MOE_ACT: has_experts,
        RecomputeModule.SHARED_EXPERTS: model.shared_experts_ffn > 0.0,
        RecomputeModule.LAYERNORM: has_experts or model.latent_weights > 0.0,
        RecomputeModule.MLA_UP_PROJ: model.latent_weights > 0.0,
    }
    if missing := sorted(module for module in modules if not there.get(module, True)):
        why = " (the norms of its layers are part of the products after them)" if missing == ["layernorm"] else ""
        has = ", ".join(module for module in RecomputeModule if there.get(module, True))
        raise InputError(f"recompute_modules {', '.join(missing)}: {model.name!r} has none{why}; it has {has}")
    inner = modules & {RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS}
    if RecomputeModule.MOE in modules and inner:
        raise InputError(f"recompute_modules: moe contains {', '.join(sorted(inner))}; leave one of them out")
