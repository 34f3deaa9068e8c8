"""Partition of a model into pipeline stages: the layers of each, the embedding, the head and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshmark.errors import LayoutError
from meshmark.spec.layout import Layout
from meshmark.spec.model_config import ImageModelConfig, LayerSizes
from meshmark.spec.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Contents of one pipeline stage."""

    num_layers: int
    has_embedding: bool = False
    has_head: bool = False
    has_loss: bool = False
    """The loss may be on a later stage than the head; the logits are then sent there."""


def uniform_stages(model: ModelSpec, num_stages: int) -> tuple[Stage, ...]:
    """Distribute layers evenly, with the remainder on the first stages, the embedding first, and head and loss
    last.
    """
    if num_stages > model.num_layers:
        raise LayoutError(f"{num_stages} pipeline stages are more than {model.num_layers} layers of {model.name!r}")
    share, rest = divmod(model.num_layers, num_stages)
    last = num_stages - 1
    return tuple(
        Stage(num_layers=share + (i < rest), has_embedding=i == 0, has_head=i == last, has_loss=i == last)
        for i in range(num_stages)
    )


@lru_cache(maxsize=4096)
def eased_stages(model: ModelSpec, num_stages: int) -> tuple[Stage, ...]:
    """Distribute layers evenly, with embedding and head counting as a layer each.

    The first and the last stage then hold fewer layers. A remainder goes to the middle stages.
    """
    counted = model.num_layers + 2
    if num_stages > counted:  # none of which fits; some stages are empty
        sizes = [int(i <= model.num_layers) + (i == num_stages - 1) for i in range(num_stages)]
        return _ended(sizes)
    share, rest = divmod(counted, num_stages)
    first = (num_stages - rest) // 2
    return _ended([share + (first <= i < first + rest) for i in range(num_stages)])


def _ended(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Return stages of these sizes, where the first counts the embedding and the last the head as a layer."""
    last = len(sizes) - 1
    return tuple(
        Stage(num_layers=size - (i == 0) - (i == last), has_embedding=i == 0, has_head=i == last, has_loss=i == last)
        for i, size in enumerate(sizes)
    )


def held_stage(model: ModelSpec, layout: Layout, rank: int) -> Stage:
    """Return everything that `rank` holds of an evenly cut pipeline as one stage."""
    own = layout.coordinates(rank).pp
    if not layout.folded:  # where chunks are equal, those of a rank are the even cut's
        return uniform_stages(model, layout.pp)[own]
    cut = uniform_stages(model, layout.pp * layout.virtual_stages)
    held = [cut[stage] for stage in layout.stages_of(own)]
    return Stage(
        num_layers=sum(stage.num_layers for stage in held),
        has_embedding=held[0].has_embedding,
        has_head=held[-1].has_head,
        has_loss=held[-1].has_loss,
    )


def held_layers(model: ImageModelConfig, layout: Layout, rank: int) -> list[LayerSizes]:
    """Return the layers that `rank` holds of an image model whose blocks are distributed evenly by number.

    Stages have unequal sizes if blocks do.
    """
    num_stages = layout.pp * layout.virtual_stages
    share, rest = divmod(model.num_layers, num_stages)
    held: list[LayerSizes] = []
    for stage in layout.stages_of(layout.coordinates(rank).pp):
        first = 1 + stage * share + min(stage, rest)
        held += [model.layers[0]] * (stage == 0) + [*model.layers[first : first + share + (stage < rest)]]
        held += [model.layers[-1]] * (stage == num_stages - 1)
    return held


def sent_on(model: ImageModelConfig, num_stages: int, boundary: int) -> int:
    """Return the values of one image that cross the boundary after a stage of the same cut."""
    share, rest = divmod(model.num_layers, num_stages)
    return model.layers[(boundary + 1) * share + min(boundary + 1, rest)].outputs


def balanced_stages(model: ModelSpec, num_stages: int, *, head_share: float = 1.0) -> tuple[Stage, ...]:
    """Distribute blocks in order, closing each stage with the block that exceeds its share of the total cost.

    The cost of a layer or of the head is its number of matrix weights; embedding, norm and loss cost nothing. The
    block that crosses the threshold stays with the stage. Early stages are therefore heavier, and the last may hold
    only the loss. This is how nanotron cuts (`build_model` of its models/base.py). `head_share` is the share of the
    head's weights that counts.
    """
    layer = 2 * model.hidden * (model.hidden + model.kv_hidden) + matrix_ffn_parameters(model)
    head = head_share * model.vocab_size * model.hidden
    blocks = [("embedding", 0), *[("layer", layer)] * model.num_layers, ("head", head), ("loss", 0)]
    total = layer * model.num_layers + head
    held: list[list[str]] = [[] for _ in range(num_stages)]
    stage, running = 0, 0.0
    for kind, cost in blocks:
        held[stage].append(kind)
        running += cost
        if running * num_stages > total * (stage + 1):
            stage += 1
    return tuple(
        Stage(
            num_layers=kinds.count("layer"),
            has_embedding="embedding" in kinds,
            has_head="head" in kinds,
            has_loss="loss" in kinds,
        )
        for kinds in held
    )


def matrix_ffn_parameters(model: ModelSpec) -> int:
    """Return the weights of the feed-forward network's matrices: two, or three with a gate."""
    matrices = 2 if model.family == "gpt" else 3
    return matrices * model.hidden * model.ffn_hidden


@lru_cache(maxsize=4096)
def stages(model: ModelSpec, num_stages: int, *, balanced: bool, head_share: float = 1.0) -> tuple[Stage, ...]:
    """Return the pipeline's stages under either rule."""
    if balanced:
        return balanced_stages(model, num_stages, head_share=head_share)
    return uniform_stages(model, num_stages)
