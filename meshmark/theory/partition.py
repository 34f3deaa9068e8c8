"""How a pipeline is cut: which stage holds how many layers, the embedding, the head and the loss."""

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
    """What one pipeline stage holds."""

    num_layers: int
    has_embedding: bool = False
    has_head: bool = False
    has_loss: bool = False
    """The loss can sit on a later stage than the head; the logits are then sent over."""


def uniform_stages(model: ModelSpec, num_stages: int) -> tuple[Stage, ...]:
    """Layers spread evenly, the remainder on the first stages; embedding first, head and loss last."""
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
    """An even cut in which embedding and head count as a layer each, so that the first and the last stage hold fewer;
    what then does not divide lies in the middle."""
    counted = model.num_layers + 2
    if num_stages > counted:  # none of which fits; some stages are empty
        sizes = [int(i <= model.num_layers) + (i == num_stages - 1) for i in range(num_stages)]
        return _ended(sizes)
    share, rest = divmod(counted, num_stages)
    first = (num_stages - rest) // 2
    return _ended([share + (first <= i < first + rest) for i in range(num_stages)])


def _ended(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Stages of so many layers, of which the first counts the embedding and the last the head."""
    last = len(sizes) - 1
    return tuple(
        Stage(num_layers=size - (i == 0) - (i == last), has_embedding=i == 0, has_head=i == last, has_loss=i == last)
        for i, size in enumerate(sizes)
    )


def held_stage(model: ModelSpec, layout: Layout, rank: int) -> Stage:
    """All that `rank` holds of a pipeline that is cut evenly, as one."""
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
    """All that `rank` holds of a model of images in a pipeline whose blocks are cut evenly by their number: stages of
    unequal size, where blocks are."""
    num_stages = layout.pp * layout.virtual_stages
    share, rest = divmod(model.num_layers, num_stages)
    held: list[LayerSizes] = []
    for stage in layout.stages_of(layout.coordinates(rank).pp):
        first = 1 + stage * share + min(stage, rest)
        held += [model.layers[0]] * (stage == 0) + [*model.layers[first : first + share + (stage < rest)]]
        held += [model.layers[-1]] * (stage == num_stages - 1)
    return held


def sent_on(model: ImageModelConfig, num_stages: int, boundary: int) -> int:
    """Numbers of one image that go over the boundary behind a stage of the same cut."""
    share, rest = divmod(model.num_layers, num_stages)
    return model.layers[(boundary + 1) * share + min(boundary + 1, rest)].outputs


def balanced_stages(model: ModelSpec, num_stages: int, *, head_share: float = 1.0) -> tuple[Stage, ...]:
    """Blocks in order, each stage closed by the block that takes the running cost past its share of the total.

    The cost of a layer or of the head is the number of its matrix weights; embedding, norm and loss cost nothing.
    The block that crosses the threshold stays with the stage, so early stages are the heavier ones, and the last can
    hold the loss alone: this is how nanotron cuts (`build_model` of its models/base.py). `head_share` is what of the
    head's weights counts.
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
    """Weights of the feed-forward network's matrices: two, or three with a gate."""
    matrices = 2 if model.family == "gpt" else 3
    return matrices * model.hidden * model.ffn_hidden


@lru_cache(maxsize=4096)
def stages(model: ModelSpec, num_stages: int, *, balanced: bool, head_share: float = 1.0) -> tuple[Stage, ...]:
    """The pipeline's stages under either rule."""
    if balanced:
        return balanced_stages(model, num_stages, head_share=head_share)
    return uniform_stages(model, num_stages)
