"""Peak memory of an eager run in one step: at the loss, within the backward pass, or in the update.

What is alive besides activations depends on how a framework brings gradients from the backward pass to the update. It
also depends on gloo, whose all-gathers and reduce-scatters copy the whole tensor.

In FSDP's backward pass (FSDP2's and FairScale's) the units are the blocks, and the root with all else. Weights are
gathered for a unit and for the next one, and its gradients are whole until they are reduced. The root is gathered all
through the backward pass, and its gradients stay until the end. A rank that is alone copies a unit's weights when they
are needed, and its gradients into one tensor and from there into another; nothing is sent.

In FSDP1's, each unit is one flat tensor; see `_pre_backward_hook` and `_post_backward_hook` of PyTorch's
distributed/fsdp/_runtime_utils.py.

`backward_passes` has the order of the passes of a rank in PyTorch's pipelines, and what it holds besides them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.spec.layout import Schedule
from meshmark.theory.backward_pass import Pass
from meshmark.theory.grid import Column, Grid
from meshmark.theory.model_theory import bucket_elements
from meshmark.theory.partition import filled_elements, largest_temporaries, parameter_sizes, part_elements
from meshmark.theory.recipe import GradientPath, TrainingRecipe, UpdateForm
from meshmark.theory.streamed import streamed_peak, streamed_update_peak

# --- Order of the passes of a rank in PyTorch's pipelines, and what it holds besides them.


@dataclass(frozen=True, kw_only=True)
class Backward:
    """A backward pass, described by what exists when it begins."""

    chunk: int
    """Index of its chunk on the rank."""
    passes: tuple[int, ...]
    """Forward passes, by chunk, that wait for their backward pass, including its own."""
    begun: tuple[bool, ...]
    """By chunk: True if an earlier backward pass has left gradients."""
    outputs: int
    """Messages to the next stage that still exist."""
    gradients: int
    """Messages to the previous stage that still exist."""


@functools.lru_cache(maxsize=1024)
def backward_passes(schedule: Schedule, pp: int, index: int, m: int, chunks: int) -> tuple[Backward, ...]:
    """Return the distinct backward passes of rank `index` with `m` micro-batches."""
    found: dict[Backward, None] = {}
    waiting: list[list[int]] = [[] for _ in range(chunks)]
    done = [0] * chunks
    for forward, chunk, micro_batch in _order(schedule, pp, index, m, chunks):
        if forward:
            waiting[chunk].append(micro_batch)
            continue
        passes = tuple(map(len, waiting))
        if chunks > 1:
            outputs, gradients = _runtime_messages(pp, index, passes, done)
        else:
            outputs, gradients = _messages(schedule, pp, index, m, waiting[0], micro_batch)
        begun = tuple(n > 0 for n in done)
        one = Backward(chunk=chunk, passes=passes, begun=begun, outputs=outputs, gradients=gradients)
        found[one] = None
        waiting[chunk].remove(micro_batch)
        done[chunk] += 1
    return tuple(found)


def _order(schedule: Schedule, pp: int, index: int, m: int, chunks: int) -> Iterator[tuple[bool, int, int]]:
    """Yield the passes in order, as (is forward, chunk, micro-batch).

    GPipe (arXiv:1811.06965): all forward passes first; only two of the backward passes, because later ones hold less.
    Interleaved: in groups of p through chunk after chunk, and in the reverse order backward (arXiv:2104.04473 sec.
    2.2.2).
    """
    total = m * chunks
    groups = [range(first, min(first + pp, m)) for first in range(0, m, pp)]
    passes = [(chunk, micro_batch) for group in groups for chunk in range(chunks) for micro_batch in group]
    passes = passes if chunks > 1 else [(0, i) for i in range(m)]
    # PyTorch's interleaved schedule starts with a forward pass where its plain one starts with a backward pass.
    warm = min(2 * (pp - index - 1) + (chunks - 1) * pp + 1 if chunks > 1 else pp - index, total)
    if schedule is Schedule.GPIPE:
        warm = total
    for step in range(total):
        chunk, micro_batch = passes[step]
        yield True, chunk, micro_batch
        if step >= warm - 1:
            chunk, micro_batch = passes[step - warm + 1]
            yield False, chunks - 1 - chunk, micro_batch
    for step in range(total - warm + 1, min(2, total) if schedule is Schedule.GPIPE else total):
        chunk, micro_batch = passes[step]
        yield False, chunks - 1 - chunk, micro_batch


def _messages(
    schedule: Schedule, pp: int, index: int, m: int, waiting: Sequence[int], micro_batch: int
) -> tuple[int, int]:
    """Return the outputs and gradients that PyTorch's schedules of one chunk hold during a backward pass.

    See torch/distributed/pipelining/schedules.py. The pass is that of `micro_batch`. Outputs are those of waiting
    passes, except on the last stage. GPipe keeps all that it has sent until the end of the step. 1F1B keeps the last
    gradient it sent, and the last output it sent before its first backward pass.
    """
    first, last = index == 0, index == pp - 1
    if schedule is Schedule.GPIPE:
        return m * (not last), micro_batch * (not first)
    warm = min(pp - index, m)
    kept = warm >= 2 and warm - 2 not in waiting
    return (len(waiting) + kept) * (not last), int(not first and micro_batch > 0)


def _runtime_messages(pp: int, index: int, passes: Sequence[int], done: Sequence[int]) -> tuple[int, int]:
    """Like `_messages`, for `_PipelineScheduleRuntime`, which runs several chunks.

    It keeps all that it has sent until the end of the step (`send_ops`).
    """
    forwards = [wait + over for wait, over in zip(passes, done, strict=True)]
    return sum(forwards) - forwards[-1] * (index == pp - 1), sum(done) - done[0] * (index == 0)


# --- Peak memory of the backward pass of FSDP1, whose units are flat tensors.


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """One unit, by its sizes in bytes."""

    low: Column
    """Bytes of the gathered weights, and of their gradients."""
    wide: Column
    """Bytes of the gradients in the dtype of the reduction."""
    widened: bool
    """True if these are two different tensors."""
    shards: Column

    @property
    def together(self) -> Column:
        """Bytes when all gradients are made: the gradients and their flat tensor."""
        return 2 * self.low

    @property
    def reduced(self) -> Column:
        """Bytes without the weights: the flat tensor, its wide copy, gloo's copy of that, and this rank's part."""
        return (self.low if self.widened else 0.0) + 2 * self.wide + self.wide / self.shards

    @property
    def gathering(self) -> Column:
        """Bytes of the weights, gloo's copy, and this rank's part if it is cast to a narrower dtype first."""
        return 2 * self.low + (self.low / self.shards if self.widened else 0.0)


def flat_units_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak in bytes of a backward pass with flat units.

    A block's weights are gathered while the previous one, in backward order, runs. The root's weights are there from
    the forward pass on. Unlike in FSDP2, reduced tensors do not stay until the next unit.
    """
    shards, last = grid.dp * grid.cp / recipe.replicas, one.stage.num_layers - 1
    unit, root = (
        _Flat(
            low=recipe.wire.gather_bytes * count,
            wide=recipe.wire.reduce_bytes * count,
            widened=recipe.wire.reduce_bytes > recipe.wire.gather_bytes,
            shards=shards,
        )
        for count in (one.block_parameters, num_parameters - one.stage.num_layers * one.block_parameters)
    )
    held = recipe.states.gradient_bytes * num_parameters / shards if later else 0.0
    ahead = recipe.backward.kept_share < 1  # weights that are kept are gathered no more
    gathered = unit.low - one.kept_weights
    beside = recipe.wire.gather_bytes * one.head_parameters
    found = [one.loss(recipe.backward.loss_tensors).activations, one.held + unit.gathering * ahead]
    found.append(one.head().activations + beside + unit.low * ahead)
    for done in one.landmarks:
        before = 0.0 if later else recipe.states.gradient_bytes * done * one.block_parameters / shards
        start, following = one.before_block(done) + one.stream + beside + before, ahead and done < last
        found.append(start + gathered + unit.gathering * following)
        for i in one.in_block(done):
            made = recipe.wire.gather_bytes * (i.made - one.head_parameters - done * one.block_parameters)
            found.append(i.activations + beside + before + gathered + made + unit.low * following)
        over = start - one.block + unit.low * following
        found += [over + gathered + unit.together, over - one.kept_weights + unit.reduced]
    end = one.before_block(one.stage.num_layers)
    blocks = 0.0 if later else recipe.states.gradient_bytes * one.stage.num_layers * one.block_parameters / shards
    tied = recipe.wire.gather_bytes * one.tied_parameters
    found.append(end + root.low + 2 * tied + blocks)  # the head's, the embedding's and their sum
    found += [end + root.together + blocks, end - root.low + root.reduced + blocks]
    most: Column = np.max(found, axis=0)
    return most + held


# --- Peak memory of the backward pass of FSDP2 and FairScale's FSDP, by unit.


@dataclass(frozen=True, kw_only=True)
class _Units:
    """Sizes of one stage's micro-batch, in elements and bytes."""

    one: Pass
    recipe: TrainingRecipe
    shards: Column
    root: Column
    """Elements outside all blocks."""
    later: bool
    """True if shards of gradients from earlier micro-batches exist."""

    @property
    def low(self) -> float:
        return self.recipe.wire.gather_bytes

    @property
    def wide(self) -> float:
        return self.recipe.wire.reduce_bytes

    @property
    def block(self) -> Column:
        """Elements of a block."""
        return self.one.block_parameters

    @property
    def gathered_root(self) -> Column:
        """Bytes of the gathered root.

        Zero for a root that is kept, because it is part of what the forward pass keeps.
        """
        return self.low * self.root * (not self.recipe.backward.keeps_root)

    @property
    def gathered(self) -> Column:
        """Bytes of a block's weights, without what is kept from the forward pass."""
        return self.low * self.block - self.one.kept_weights

    @property
    def ahead(self) -> Column:
        """Bytes of the block gathered ahead. A kept part is freed when the block is used, not before."""
        backward = self.recipe.backward
        gathers = backward.prefetches and backward.kept_share < 1
        return self.low * self.block * gathers * (self.shards > 1)

    def waiting(self, blocks: int) -> Column:
        """Return the bytes of gradients in reduction, of the last of `blocks`, which stay until the next unit's."""
        kept = min(blocks, self.recipe.backward.num_reductions)
        return kept * self.wide * self.block * self.recipe.backward.prefetches

    def waiting_beside(self, blocks: int) -> Column:
        """Return the bytes of them that are left when the next unit's reduction begins, after `blocks`."""
        return self.waiting(min(blocks, self.recipe.backward.num_reductions - 1))

    def reduced(self, blocks: float) -> Column:
        """Return the bytes of this rank's part of reduced blocks, without what exists anyway."""
        return (0.0 if self.later else blocks) * self.recipe.states.gradient_bytes * self.block / self.shards

    def reducing(self, elements: Column, last: Column) -> Column:
        """Return the bytes of a unit's gradients when its weights are freed. Its last gradient has `last` elements.

        FSDP2 holds the tensor that they were copied into; and between ranks gloo's copy, and the last copied gradient,
        through a loop variable (`foreach_reduce` of PyTorch's fsdp/_fully_shard/_fsdp_collectives.py). FairScale holds
        their flat tensor, its wide copy, a bucket, and gloo's copy of that.
        """
        part = self.wide * elements / self.shards
        if self.recipe.backward.prefetches:
            sent = np.where(self.shards > 1, self.low * last + self.wide * elements, 0.0)
            return self.wide * elements + sent + part
        return (self.low if self.wide > self.low else 0.0) * elements + 3 * self.wide * elements + part


def units_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    shards = grid.dp * grid.cp / recipe.replicas
    root = num_parameters - one.stage.num_layers * one.block_parameters
    units = _Units(one=one, recipe=recipe, shards=shards, root=root, later=later)
    # When the root is gathered, a copy of it is made; then one of the first block's weights, ahead. The copies in a
    # narrower dtype that a rank makes alone are less than the head's gradient, which follows.
    copies = np.where(shards > 1, np.maximum(units.gathered_root, 2 * units.ahead), 0.0)
    found = [one.loss(recipe.backward.loss_tensors).activations, one.held + units.gathered_root + copies]
    found.append(one.head().activations + units.gathered_root + units.low * one.head_parameters + units.ahead)
    found += [instant for done in one.landmarks for instant in _of_block(units, done)]
    found += _of_root(units)
    most: Column = np.max(found, axis=0)
    return most + (recipe.states.gradient_bytes * num_parameters / shards if later else 0.0)


def _of_block(units: _Units, done: int) -> Iterator[Column]:
    """Yield the bytes during the block after `done` others."""
    one, low, prefetches = units.one, units.low, units.recipe.backward.prefetches
    following = units.ahead if done < one.stage.num_layers - 1 else 0.0
    beside = units.gathered_root + low * one.head_parameters + units.reduced(done)
    start, queued = one.before_block(done) + one.stream + beside + following, units.waiting(done)
    yield start + units.gathered + (following if prefetches else units.gathered) + queued
    for i in one.in_block(done):
        made = i.made - one.head_parameters - done * units.block
        yield i.activations + beside + following + units.gathered + low * made + queued
    reducing = units.reducing(units.block, _last_of(one)[0]) + units.waiting_beside(done)
    yield start - one.block - one.kept_weights + reducing


def _of_root(units: _Units) -> Iterator[Column]:
    """Yield the bytes when the embedding's gradient is made, and when all gradients of the root are reduced."""
    one, root, layers = units.one, units.low * units.root, units.one.stage.num_layers
    end = one.before_block(layers) + units.reduced(layers)
    gathered, tied = units.gathered_root + root + units.waiting(layers), units.low * one.tied_parameters
    yield end + one.stream + gathered + tied
    yield end + gathered + 2 * tied  # the head's, the embedding's and their sum
    kept = root - units.gathered_root  # given up before it is reduced
    yield end - kept + units.reducing(units.root, _last_of(one)[1]) + units.waiting_beside(layers)


def _last_of(one: Pass) -> tuple[Column, Column]:
    """Return the elements of the last parameter of a block, and of the root."""
    embedding, block, head = parameter_sizes(one.model, one.stage, one.tp)
    none = [0.0 * one.tp]
    return (block or none)[-1], (head or embedding or none)[-1]


# --- Peak memory of an eager run in one step: at the loss, within the backward pass, or in the update.


def eager_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column) -> Column:
    """Return the peak of a backward pass without a pipeline, beyond parameters, masters and moments.

    With several micro-batches the last one counts, because gradients already exist then.
    """
    peaks = _DEEPSPEED.get(recipe.backward.gradient_path, _sharded_peak)
    first, later = (peaks(one, grid, recipe, num_parameters, later) for later in (False, True))
    found: Column = np.where(grid.num_micro_batches > 1, later, first)
    return found


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One of a pipeline rank's chunks of the model, by its sizes."""

    one: Pass
    num_parameters: Column
    gradients: Column
    """Bytes of the gradients that are held for the update."""


def pipeline_peak(
    chunks: Sequence[Chunk], passes: Sequence[Backward], grid: Grid, recipe: TrainingRecipe, message: Column
) -> Column:
    """Return the peak of a pipeline's rank over its backward passes.

    Each adds the forward passes that wait, other chunks' gradients, and sent messages of `message` bytes each.
    """
    peaks = _DEEPSPEED.get(recipe.backward.gradient_path, _sharded_peak)
    by_chunk = [
        [peaks(c.one, grid, recipe, c.num_parameters, later) - c.one.held for later in (False, True)] for c in chunks
    ]
    found = list[Column]()
    for at in passes:
        most = by_chunk[at.chunk][at.begun[at.chunk]] + (at.outputs + at.gradients) * message
        for i, (num_passes, begun, chunk) in enumerate(zip(at.passes, at.begun, chunks, strict=True)):
            most = most + num_passes * chunk.one.held + (chunk.gradients if begun and i != at.chunk else 0.0)
        found.append(most)
    return _most(found)


def _most(found: Sequence[Column]) -> Column:
    """Return the maximum, row by row."""
    most: Column = np.max(found, axis=0)
    return most


def update_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column) -> Column:
    """Return the bytes of gradients and AdamW's temporaries, by the form of its step.

    DeepSpeed passes one flat tensor, and the root of the second moments and its quotient are as large as it.
    """
    path, width = recipe.backward.gradient_path, recipe.states.gradient_bytes
    if path is GradientPath.STREAMED:
        return streamed_update_peak(one, grid, recipe, num_parameters)
    shards = np.where(grid.zero_stage >= recipe.states.gradient_stage, grid.dp * grid.cp / recipe.replicas, 1)
    held = width * num_parameters / shards
    flat = held * (3 if recipe.states.moment_bytes else 1)
    if path is GradientPath.STAGED:
        return flat
    if path is GradientPath.MODULES:
        return held + flat + width * bucket_elements(one.model)  # the flat tensor is a copy
    own = np.where(grid.zero_stage >= 3, shards, 1)  # below stage 3 an owner has whole tensors (FairScale's OSS)
    temporaries = {
        UpdateForm.LOOP: largest_temporaries(one.model, one.stage, one.tp) / own,
        UpdateForm.FOREACH: num_parameters / own,
        UpdateForm.FUSED: 0.0 * num_parameters,
    }
    return held + (width if recipe.states.moment_bytes else 0.0) * temporaries[recipe.update]


def _whole_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak with whole gradients or with buckets, which exist from the start of the step.

    With DDP, gradients of earlier micro-batches lie next to the buckets, each until it is copied to its bucket.
    """
    width, buckets = recipe.states.gradient_bytes, recipe.backward.gradient_path is GradientPath.BUCKETS
    unreduced = np.where(grid.pp == 1, buckets and later and recipe.backward.accumulates_outside_buckets, 0)
    found = list[Column]()
    for instant in one.instants(recipe.backward.loss_tensors):
        fresh = instant.num_parameters + instant.waiting
        beside = unreduced * (num_parameters - (instant.made - fresh))
        there = num_parameters + fresh + beside if later or buckets else instant.made
        found.append(instant.activations + width * there)
    return _most(found)


def _flattened_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of DeepSpeed without ZeRO: whole gradients, and at the end a flat copy of them."""
    flat = 2 * recipe.states.gradient_bytes * num_parameters
    return _most([_whole_peak(one, grid, recipe, num_parameters, later), flat])


def _staged_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of DeepSpeed's stage 1.

    The bucket exists next to whole gradients from the first gradient of the step on. When it is full for the first
    time, its gradients are freed and the rank's part is allocated.
    """
    width, bucket = recipe.states.gradient_bytes, bucket_elements(one.model)
    before = _most(
        [
            instant.activations
            + width
            * (
                num_parameters + instant.num_parameters + instant.waiting + bucket
                if later
                else instant.made + np.where(instant.made > 0, bucket, 0)
            )
            for instant in one.instants(recipe.backward.loss_tensors)
        ]
    )
    filled = filled_elements(one.model, one.stage, one.tp, bucket)
    part = part_elements(one.model, one.stage, one.tp, grid.dp, 0)
    return _most([before, width * (num_parameters + part + bucket - filled)])


def _modules_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of DeepSpeed's stage 3.

    A rank's gradients and the bucket are permanent. A module's weight is gathered when it is used. A full bucket is
    flattened once more and reduced.
    """
    width, bucket = recipe.states.gradient_bytes, bucket_elements(one.model)
    found = [one.loss(recipe.backward.loss_tensors).activations]
    for instant in [one.head(), *(i for done in one.landmarks for i in one.in_block(done))]:
        found.append(instant.activations + (width + recipe.wire.gather_bytes) * instant.num_parameters)
    found += [one.in_block(done)[-1].activations + recipe.wire.reduce_bytes * 2 * bucket for done in one.landmarks]
    return _most(found) + width * (num_parameters / grid.dp + bucket)


def _sharded_peak(one: Pass, grid: Grid, recipe: TrainingRecipe, num_parameters: Column, later: bool) -> Column:
    """Return the peak of the gradient path. Sharded weights are gathered as FSDP does, whatever the path."""
    flat = recipe.backward.gradient_path is GradientPath.FLAT_UNITS
    peaks = (_whole_peak, flat_units_peak if flat else units_peak)
    whole, units = (peak(one, grid, recipe, num_parameters, later) for peak in peaks)
    found: Column = np.where(grid.zero_stage >= 3, units, whole)
    return found


_DEEPSPEED: dict[GradientPath, Callable[[Pass, Grid, TrainingRecipe, Column, bool], Column]] = {
    GradientPath.FLATTENED: _flattened_peak,
    GradientPath.STAGED: _staged_peak,
    GradientPath.STREAMED: streamed_peak,
    GradientPath.MODULES: _modules_peak,
}
