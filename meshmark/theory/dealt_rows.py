"""Shards of whole rows, as FSDP2 makes them: equally many rows of a tensor per rank, until none are left."""

from __future__ import annotations

import numpy as np

from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.theory.grid import Column
from meshmark.theory.partition import Stage


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
