"""DeepSpeed's ZeRO stage 2, gradient by gradient, as in its runtime/zero/stage_1_and_2.py.

It gives the memory besides activations when each gradient arrives, when its bucket is full and reduced, and in the
update.

It follows the backward pass of this project's own model operation by operation, in eager mode on a CPU without
autocast. For each operation it gives what it makes, what is freed afterwards, and whose gradients are then complete.
`backward_pass.py` has only the fullest instants; this module has all, for frameworks that act when a gradient arrives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshmark.models.transformer import Family
from meshmark.theory.backward_pass import INDEX_BYTES, Pass, attention_bytes, norm_bytes
from meshmark.theory.grid import Column, Grid
from meshmark.theory.model_theory import bucket_elements
from meshmark.theory.partition import parameter_shapes, parameter_sizes
from meshmark.theory.recipe import TrainingRecipe

# --- The backward pass of this project's own model, operation by operation, in eager mode on a CPU without autocast.


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


# --- DeepSpeed's ZeRO stage 2, gradient by gradient, as in its runtime/zero/stage_1_and_2.py.

_MOST_RANKS = 16
"""Number of ranks among which the fullest is searched if no rank is given."""
_WIDE = 8
"""Bytes per element of the float64 copy that the norm is computed from."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Equal parts of even size of the flat sequence of parameters, by rank (rows) and layout (columns)."""

    rank: Column
    size: Column

    @classmethod
    def of(cls, grid: Grid, num_parameters: Column) -> Parts:
        """Return the parts of the given rank, or of all ranks that may be the fullest."""
        every = np.arange(min(int(grid.dp.max()), _MOST_RANKS) if (grid.dp_rank < 0).any() else 1)[:, None]
        rank, shards = np.where(grid.dp_rank >= 0, grid.dp_rank, np.minimum(every, grid.dp - 1)), grid.dp * grid.cp
        return cls(rank=rank, size=2 * np.ceil(num_parameters / (2 * shards)))

    def local_elements(self, parameter: Parameter) -> Column:
        """Return the elements of a parameter in a rank's part."""
        low, high = self.rank * self.size, (self.rank + 1) * self.size
        found: Column = np.maximum(np.minimum(parameter.stop, high) - np.maximum(parameter.start, low), 0)
        return found

    def first(self, parameter: Parameter) -> Column:
        """Return the part in which a parameter begins."""
        found: Column = parameter.start // self.size
        return found

    def last(self, parameter: Parameter) -> Column:
        found: Column = (parameter.stop - 1) // self.size
        return found

    def whole(self, every: Iterable[Parameter]) -> Column:
        """Return the elements of all parameters that overlap a rank's part."""
        found: Column = np.sum([one.size * (self.local_elements(one) > 0) for one in every], axis=0)
        return found


class Bucket:
    """The bucket that gradients are copied into until the next one would not fit.

    They are then reduced; gradients for the parts of several ranks are reduced in one flat copy. Gradients that
    overlap the rank's own part move to a tensor for all of these.
    """

    def __init__(self, capacity: int, parts: Parts, part: Column, number: int = 1) -> None:
        """`number` is how many such buckets are filled in turn."""
        self.capacity, self.parts, self.part, self.number = capacity, parts, part, number
        self.there, self.made = 0.0 * part, 0.0 * part
        """Elements of the bucket and of the part. They exist from the first gradient on, or from the first one in the
        part.
        """
        self.beside = 0.0 * part
        """Elements of a gradient too large for the bucket, which is reduced in place."""
        self.filled, self.owns = 0.0 * part, part < 0
        self.first, self.last = part + np.inf, part - np.inf

    @property
    def elements(self) -> Column:
        return self.there + self.made + self.beside

    def take(self, parameter: Parameter) -> Column:
        """Add an arriving gradient. Returns the most elements that exist meanwhile, without the gradient itself."""
        self.there = 0.0 * self.part + self.number * self.capacity
        most = self.reduce(self.filled + parameter.size > self.capacity)
        self.filled = self.filled + parameter.size
        self.beside = np.where(parameter.size > self.capacity, parameter.size, self.beside)
        self.owns = self.owns | (self.parts.local_elements(parameter) > 0)
        self.first = np.minimum(self.first, self.parts.first(parameter))
        self.last = np.maximum(self.last, self.parts.last(parameter))
        return most

    def reduce(self, full: Column) -> Column:
        """Reduce the bucket where it is `full`. Returns the most elements that exist meanwhile."""
        copied = self.elements + np.where(full & (self.first < self.last), self.filled, 0.0)
        self.made = np.where(full & self.owns, self.part, self.made)
        most: Column = np.maximum(copied, self.elements)
        self.beside, self.filled = np.where(full, 0.0, self.beside), np.where(full, 0.0, self.filled)
        self.owns = self.owns & ~full
        self.first, self.last = np.where(full, np.inf, self.first), np.where(full, -np.inf, self.last)
        return most


def streamed_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of the backward pass. `later`: the part from previous micro-batches exists too."""
    width, parts = recipe.states.gradient_bytes, Parts.of(grid, num_parameters)
    part = parts.whole(parameters(one).values())
    capacity = recipe.backward.bucket_elements or bucket_elements(one.model)
    bucket, found = Bucket(capacity, parts, part, recipe.backward.num_buckets), list[Column]()
    for moment in moments(one, recipe.backward.loss_tensors):
        fresh = sum((p.size for p in moment.parameters), start=0.0 * one.tp)
        found.append(moment.during + width * (bucket.elements + fresh))
        for parameter in moment.parameters:
            found.append(moment.after + width * (bucket.take(parameter) + fresh))
            fresh = fresh - parameter.size
    found.append(width * bucket.reduce(part >= 0))
    most: Column = np.max(np.max(found, axis=0) + width * part * later, axis=0)
    return most


def streamed_update_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column) -> Column:
    """Return the peak of the update.

    It is the largest of: the norm, computed in float64 of one gradient after another; the rank's flat part, next to
    the tensors that overlap it, and with AdamW's two temporaries; and the weights of all ranks, which gloo gathers in
    a copy.
    """
    width, every, parts = recipe.states.gradient_bytes, parameters(one).values(), Parts.of(grid, num_parameters)
    own = np.array([parts.local_elements(p) for p in every])
    part, flat = parts.whole(every), parts.size + 0.0 * parts.rank
    copied = np.where(own.max(axis=0) < flat, flat, 0.0)  # of one tensor alone, a view
    updating = 2 * flat * (recipe.states.moment_bytes > 0) + np.where(copied > 0, flat, part)
    found = [
        width * part + _WIDE * own.max(axis=0),
        width * (part + copied),
        width * updating,
        recipe.wire.gather_bytes * grid.dp * grid.cp * flat,
    ]
    most: Column = np.max(found, axis=(0, 1))
    return most
