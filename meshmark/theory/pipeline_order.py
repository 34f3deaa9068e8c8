"""Order of the passes of a rank in PyTorch's pipelines, and what it holds besides them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshmark.spec.layout import Schedule


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
