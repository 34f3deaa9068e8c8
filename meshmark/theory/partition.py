"""Partition of a model: into pipeline stages, and of a stage's parameters into shards.

A stage has some layers, the embedding, the head or the loss. Optimizers visit its parameters in an order, and flat
shards are parts of that sequence. FSDP2 deals out whole rows instead: equally many rows of a tensor per rank, until
none are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshmark.errors import LayoutError
from meshmark.models.config import ImageModelConfig, LayerSizes
from meshmark.models.transformer import Family, ModelSpec
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.precision import Dtype
from meshmark.theory.grid import Column

# --- Partition of a model into pipeline stages: the layers of each, the embedding, the head and the loss.


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


# --- Shards of whole rows, as FSDP2 makes them: equally many rows of a tensor per rank, until none are left.


def dealt_parameters(model: ModelSpec, stage: Stage, tp: Column, shards: Column) -> Column:
    """Return the parameters of the first and largest shard of one stage on one tensor-parallel rank.

    Every rank has as many elements, because smaller shards are padded.
    """
    h, kv, f, gpt = model.hidden, model.kv_hidden / tp, model.ffn_hidden / tp, model.family is Family.GPT
    q, one = h / tp, np.ones(len(tp))

    def dealt(rows: Column, row: Column | float = 1.0) -> Column:
        found: Column = np.ceil(rows / shards) * row
        return found

    def linear(outer: Column, inner: Column | float) -> Column:
        return dealt(outer, inner) + (dealt(outer) if gpt else 0.0)

    norm, vocabulary = dealt(h * one) * (2 if gpt else 1), dealt(model.vocab_size / tp, h)
    attention = linear(q, h) + 2 * linear(kv, h) + linear(h * one, q)
    block = 2 * norm + attention + linear(f, h) * (1 if gpt else 2) + linear(h * one, f)
    total: Column = stage.num_layers * block
    if stage.has_embedding:
        total = total + vocabulary + (dealt(model.seq_len * one, h) if gpt else 0.0)
    if stage.has_head:
        total = total + norm + (0.0 if model.tied_embeddings and stage.has_embedding else vocabulary)
    return total


# --- Parameters of a stage in the order in which optimizers visit them, and parts of their flat sequence.


def parameter_sizes(model: ModelSpec, stage: Stage, tp: Column) -> tuple[list[Column], list[Column], list[Column]]:
    """Return the sizes of all parameters on one tensor-parallel rank: those of the embedding, of one block and of the
    head.

    Lists are empty for what the stage does not have.
    """
    h, kv, f = model.hidden, model.kv_hidden / tp, model.ffn_hidden / tp
    q, gpt, one = h / tp, model.family is Family.GPT, np.ones(len(tp))
    norm = [h * one] * (2 if gpt else 1)
    vocabulary = model.vocab_size * h / tp

    def linear(inner: Column, outer: Column) -> list[Column]:
        return [inner * outer, outer] if gpt else [inner * outer]

    attention = [*linear(h * one, q), *linear(h * one, kv), *linear(h * one, kv), *linear(q, h * one)]
    feed_forward = [*([] if gpt else [h * f]), *linear(h * one, f), *linear(f, h * one)]
    embedding = [vocabulary, *([model.seq_len * h * one] if gpt else [])]
    shared = model.tied_embeddings and stage.has_embedding
    return (
        embedding if stage.has_embedding else [],
        [*norm, *attention, *norm, *feed_forward] if stage.num_layers else [],
        [*norm, *([] if shared else [vocabulary])] if stage.has_head else [],
    )


Shapes = dict[str, tuple[int, ...]]
"""Shapes of whole parameters, by canonical name."""


def parameter_shapes(model: ModelSpec, stage: Stage) -> Shapes:
    """Return the shapes of a stage's parameters. Blocks are counted from its first."""
    h, kv, f, gpt = model.hidden, model.kv_hidden, model.ffn_hidden, model.family is Family.GPT

    def linear(name: str, outer: int, inner: int) -> Shapes:
        bias: Shapes = {f"{name}.bias": (outer,)} if gpt else {}
        return {f"{name}.weight": (outer, inner), **bias}

    def norm(name: str) -> Shapes:
        bias: Shapes = {f"{name}.bias": (h,)} if gpt else {}
        return {f"{name}.weight": (h,), **bias}

    found: Shapes = {}
    if stage.has_embedding:
        found["embedding.tokens.weight"] = (model.vocab_size, h)
    if stage.has_embedding and gpt:
        found["embedding.positions.weight"] = (model.seq_len, h)
    for block in (f"blocks.{i}" for i in range(stage.num_layers)):
        found |= norm(f"{block}.attention_norm") | linear(f"{block}.attention.q", h, h)
        found |= linear(f"{block}.attention.k", kv, h) | linear(f"{block}.attention.v", kv, h)
        found |= linear(f"{block}.attention.out", h, h) | norm(f"{block}.feed_forward_norm")
        found |= {} if gpt else linear(f"{block}.feed_forward.gate", f, h)
        found |= linear(f"{block}.feed_forward.up", f, h) | linear(f"{block}.feed_forward.down", h, f)
    if stage.has_head:
        found |= norm("head.norm")
    if stage.has_head and not (model.tied_embeddings and stage.has_embedding):
        found["head.output.weight"] = (model.vocab_size, h)
    return found


def optimizer_state_bytes(spec: OptimizerSpec, model: ModelSpec, stage: Stage, dtype: Dtype) -> int:
    """Return the exact bytes of all optimizer states of a stage's whole parameters.

    Includes step counts, which are not negligible compared with a row and a column.
    """
    shapes = parameter_shapes(model, stage)
    return sum(state.num_bytes for name, shape in shapes.items() for state in spec.states(name, shape, dtype))


def largest_temporaries(model: ModelSpec, stage: Stage, tp: Column) -> Column:
    """Return the elements of AdamW's temporaries on a CPU, where it visits one parameter after another.

    They are the root of the second moments and its quotient, while the previous parameter's quotient still exists.
    """
    embedding, block, head = parameter_sizes(model, stage, tp)
    sizes = [*embedding, *block, *head]
    found: Column = np.max([before + 2 * own for before, own in zip([0 * tp, *sizes], sizes, strict=False)], axis=0)
    return found


def part_elements(model: ModelSpec, stage: Stage, tp: Column, num_parts: Column, part: int) -> Column:
    """Return the elements of all tensors that overlap one of equal parts (of even size) of the sequence."""
    embedding, block, head = parameter_sizes(model, stage, tp)
    before, each = sum(embedding, start=0.0 * tp), sum(block, start=0.0 * tp)
    total = before + stage.num_layers * each + sum(head, start=0.0 * tp)
    size = 2 * np.ceil(total / (2 * num_parts))
    low, high = np.minimum(part * size, total), np.minimum((part + 1) * size, total)

    def edges(position: Column) -> Column:
        """Return ends of tensors near `position`."""
        index = np.clip((position - before) // np.maximum(each, 1), 0, max(stage.num_layers - 1, 0))
        starts = [0 * tp + start for start in (0.0, before + index * each, total - sum(head, start=0.0 * tp))]
        found: Column = np.concatenate(
            [np.cumsum([start, *sizes], axis=0) for start, sizes in zip(starts, (embedding, block, head), strict=True)]
        )
        return found

    first = np.max(np.where(edges(low) <= low, edges(low), 0.0), axis=0)
    last = np.min(np.where(edges(high) >= high, edges(high), total), axis=0)
    elements: Column = last - first
    return elements


def reaching_elements(sizes: Sequence[int], num_parts: int, part: int) -> int:
    """Return the elements of all tensors of these `sizes` that overlap one of equal parts, and of the part's padding.

    Parts have an even size. Where parts are many and small, the last ones are padding alone, which DeepSpeed keeps as
    gradients too (`get_flat_partition`, `_zero_padding`).
    """
    size = 2 * math.ceil(sum(sizes) / (2 * num_parts))
    padding = min(max((part + 1) * size - sum(sizes), 0), size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = zip(starts, sizes, strict=True)
    return padding + sum(n for start, n in spans if start < (part + 1) * size and start + n > part * size)


def filled_elements(model: ModelSpec, stage: Stage, tp: Column, bucket: float) -> Column:
    """Return the elements of the first tensors that fit into a bucket no larger than a block or the embedding."""
    embedding, block, head = parameter_sizes(model, stage, tp)
    ends = np.cumsum([*embedding, *block, *(block if stage.num_layers > 1 else []), *head], axis=0)
    found: Column = np.where(ends <= bucket, ends, 0).max(axis=0)
    return found
