"""Parameters of a stage in the order in which optimizers visit them, and parts of their flat sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.precision import Dtype
from meshmark.theory.grid import Column
from meshmark.theory.partition import Stage


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
