"""The backward pass of this project's own model, operation by operation, in eager mode on a CPU without autocast.

For each operation it gives what it makes, what is freed afterwards, and whose gradients are then complete.
`backward_pass.py` has only the fullest instants; this module has all, for frameworks that act when a gradient arrives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshmark.spec.model_spec import Family
from meshmark.theory.backward_pass import Pass
from meshmark.theory.grid import Column
from meshmark.theory.parameter_order import parameter_shapes, parameter_sizes
from meshmark.theory.saved_activations import INDEX_BYTES, attention_bytes, norm_bytes


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Position of a parameter in the flat sequence of all parameters, in elements."""

    start: Column
    size: Column

    @property
    def stop(self) -> Column:
        return self.start + self.size


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Bytes of everything but the gradients of its parameters."""

    made: Column
    """Bytes that it allocates at most at once while it runs."""
    freed: Column
    """Bytes freed when it is over."""
    parameters: tuple[str, ...] = ()
    """Parameters whose gradients it makes, which arrive when it is over."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One operation, with the memory that exists besides the gradients of parameters."""

    during: Column
    after: Column
    parameters: tuple[Parameter, ...]
    """Parameters whose gradients it makes, in the order of their arrival."""


def moments(one: Pass, loss_tensors: float) -> Iterator[Moment]:
    """Yield the moments from the loss to the embedding. `loss_tensors` is as in `Pass.loss`."""
    where, alive = parameters(one), one.held
    yield Moment(during=one.loss(loss_tensors).activations, after=alive, parameters=())
    for operation in _operations(one):
        during, alive = alive + operation.made, alive + operation.made - operation.freed
        yield Moment(during=during, after=alive, parameters=tuple(where[name] for name in operation.parameters))


def parameters(one: Pass) -> dict[str, Parameter]:
    """Return the parameters by canonical name, with blocks counted from the stage's first, in order."""
    embedding, block, head = parameter_sizes(one.model, one.stage, one.tp)
    sizes = [*embedding, *(block * one.stage.num_layers), *head]
    starts = itertools.accumulate(sizes, initial=0.0 * one.tp)
    names = parameter_shapes(one.model, one.stage)
    return {name: Parameter(start=at, size=size) for name, at, size in zip(names, starts, sizes, strict=False)}


def _operations(one: Pass) -> Iterator[Operation]:
    tied = one.model.tied_embeddings and one.stage.has_embedding and one.stage.has_head
    waits = one.widths.stream * one.head_parameters * tied
    if one.stage.has_head:
        output = () if tied else ("head.output.weight",)
        yield Operation(made=one.stream + waits, freed=one.logits + one.stream, parameters=output)
        yield from _norm(one, "head.norm", residual=False)
    block = list(_gpt_block(one) if one.model.family is Family.GPT else _llama_block(one))
    for i in reversed(range(one.stage.num_layers)):
        for operation in block:
            yield replace(operation, parameters=tuple(f"blocks.{i}.{name}" for name in operation.parameters))
    if one.stage.has_embedding:
        yield from _embedding(one, waits)


def _embedding(one: Pass, waits: Column) -> Iterator[Operation]:
    """Yield the operations of the embedding. The positions' gradient is first summed over sequences.

    `waits` is the bytes of a tied head's gradient, which is added to the embedding's in a third tensor.
    """
    if one.model.family is Family.GPT:
        positions = one.widths.stream * one.model.seq_len * one.model.hidden * np.ones(len(one.tp))
        index = INDEX_BYTES * one.model.seq_len
        yield Operation(made=positions, freed=positions + index, parameters=("embedding.positions.weight",))
    yield Operation(made=waits, freed=one.stream)
    yield Operation(made=0.0 * waits, freed=2 * waits, parameters=("embedding.tokens.weight",))


def _norm(one: Pass, name: str, *, residual: bool) -> Iterator[Operation]:
    """Yield the operations of a norm.

    With `residual`, its input's gradient is added in place to that of the stream.
    """
    stream, saved = one.stream, one.tokens * norm_bytes(one.model, one.widths, 1) / one.sp
    added = stream * residual
    if one.model.family is Family.GPT:
        yield Operation(made=stream, freed=saved + added, parameters=(f"{name}.weight", f"{name}.bias"))
        return
    # RMSNorm is written out: the product with the weight, then with the reciprocal root of the mean of squares.
    wide = one.tokens * one.widths.wide / one.sp
    yield Operation(made=2 * stream, freed=3 * stream, parameters=(f"{name}.weight",))
    yield Operation(made=2 * stream + wide, freed=2 * stream + added)
    yield Operation(made=3 * wide, freed=4 * wide)
    yield Operation(made=stream, freed=wide)
    yield Operation(made=3 * stream, freed=5 * stream)


def _gpt_block(one: Pass) -> Iterator[Operation]:
    model, stream, low = one.model, one.stream, one.widths.low
    inside = one.tokens * low * model.ffn_hidden / one.tp
    q, kv = (one.tokens * low * width / one.tp for width in (model.hidden, model.kv_hidden))
    core = one.tokens * attention_bytes(model, one.widths, one.tp)

    def linear(name: str) -> tuple[str, str]:
        return f"{name}.bias", f"{name}.weight"

    yield Operation(made=inside, freed=inside, parameters=linear("feed_forward.down"))
    yield Operation(made=inside, freed=2 * inside)
    yield Operation(made=stream, freed=inside + stream, parameters=linear("feed_forward.up"))
    yield from _norm(one, "feed_forward_norm", residual=True)
    yield Operation(made=q, freed=0 * q, parameters=linear("attention.out"))
    yield Operation(made=q + 2 * kv, freed=q + core)
    # The gradients of their common input: two are added into a third tensor, the last one in place.
    yield Operation(made=stream, freed=kv, parameters=linear("attention.v"))
    yield Operation(made=stream, freed=kv, parameters=linear("attention.k"))
    yield Operation(made=stream, freed=2 * stream)
    yield Operation(made=stream, freed=q + stream, parameters=linear("attention.q"))
    yield Operation(made=0 * stream, freed=stream)
    yield from _norm(one, "attention_norm", residual=True)


def _llama_block(one: Pass) -> Iterator[Operation]:
    """Yield the operations of a LLaMA block.

    A product without a bias hands over its input's gradient before its weight's. If the former is added to another
    gradient, the weight's has to wait.
    """
    model, stream, low, width = one.model, one.stream, one.widths.low, one.widths.stream
    inside = one.tokens * low * model.ffn_hidden / one.tp
    q, kv = (one.tokens * low * size / one.tp for size in (model.hidden, model.kv_hidden))
    core, copied = one.tokens * attention_bytes(model, one.widths, one.tp), q * (model.num_heads > one.tp)
    up, k = (width * model.hidden * size / one.tp for size in (model.ffn_hidden, model.kv_hidden))
    by_token = copied / q
    yield Operation(made=inside, freed=inside, parameters=("feed_forward.down.weight",))
    yield Operation(made=2 * inside, freed=3 * inside)
    yield Operation(made=inside, freed=2 * inside)
    yield Operation(made=stream, freed=inside, parameters=("feed_forward.gate.weight",))
    yield Operation(made=stream + up, freed=inside + stream + up)
    yield Operation(made=stream, freed=2 * stream, parameters=("feed_forward.up.weight",))
    yield from _norm(one, "feed_forward_norm", residual=True)
    yield Operation(made=q, freed=copied, parameters=("attention.out.weight",))
    yield Operation(made=q + 2 * kv, freed=q + core - copied)
    yield Operation(made=2 * kv, freed=2 * kv)  # rotary positions, of the keys and of the queries
    yield Operation(made=2 * q, freed=2 * q)
    yield Operation(made=stream, freed=kv, parameters=("attention.v.weight",))
    yield Operation(made=kv * by_token, freed=kv * by_token)  # a copy that lies by token
    yield Operation(made=stream + k, freed=kv + k)
    yield Operation(made=stream, freed=2 * stream, parameters=("attention.k.weight",))
    yield Operation(made=q * by_token, freed=q * by_token)
    yield Operation(made=stream, freed=q + 2 * stream, parameters=("attention.q.weight",))
    yield from _norm(one, "attention_norm", residual=True)
