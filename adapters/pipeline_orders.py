"""Pipelines of several stages a rank in PyTorch's other orders than interleaved 1F1B: looped breadth-first, and with a
zero bubble."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshmark.adapters.pipeline import Pipeline
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.theory.activations import num_in_flight, passes_in_flight_bytes
from meshmark.theory.grid import Column, layout_grid
from meshmark.theory.states import Remainder, micro_batch_tokens


class LoopedBFS(Pipeline):
    """Breadth first (arXiv:2211.05953): a stage's micro-batches one after the other, then those of the rank's next
    stage; all are held when the backward passes begin."""

    capabilities: ClassVar = dataclasses.replace(
        Pipeline.capabilities, schedules=frozenset({Schedule.INTERLEAVED}), virtual_stages=frozenset({2})
    )
    interleaving: ClassVar = "LoopedBFS"

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[Remainder, ...]:
        """Activations of other forward passes than 1F1B's; and on the last rank logits of as many micro-batches."""
        layout, index = case.layout, case.layout.coordinates(rank).pp
        grid, model, using = (
            layout_grid(layout, case.workload.global_batch),
            case.workload.transformer,
            cls.recipe(case),
        )
        usual = num_in_flight(grid, index)
        own, theirs = (
            float(passes_in_flight_bytes(model, grid, using, index, flight)[0])
            for flight in (cls.in_flight(layout, index, usual), usual)
        )
        reason = f"{cls.interleaving} has other micro-batches in flight than interleaved 1F1B"
        count = cls.logits_held(layout)
        logits = [dataclasses.replace(r, num_bytes=r.num_bytes * count) for r in super().remainders(case, rank)]
        return (*logits, Remainder(category="activations", num_bytes=own - theirs, reason=reason))

    @classmethod
    def in_flight(cls, layout: Layout, index: int, usual: Column) -> Column:
        """Forward passes, of a chunk each, before the first backward pass."""
        return 0 * usual + layout.num_micro_batches * layout.virtual_stages

    @classmethod
    def logits_held(cls, layout: Layout) -> int:
        """Micro-batches whose logits are there then."""
        return layout.num_micro_batches


class InterleavedZeroBubble(LoopedBFS):
    """ZB1P (arXiv:2401.10241): gradients of weights are computed late, where the bubble was, and half as many
    micro-batches as in 1F1B start ahead of a rank's successors."""

    interleaving: ClassVar = "InterleavedZeroBubble"

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[Remainder, ...]:
        layout, width = case.layout, case.precision.wide.itemsize
        inputs = layout.num_micro_batches * (layout.virtual_stages - (layout.coordinates(rank).pp == 0))
        num_bytes = inputs * micro_batch_tokens(case) * case.workload.model.hidden * width
        reason = "gradients of stages' inputs are kept until the next step, for the backward pass is in two parts"
        return (*super().remainders(case, rank), Remainder(category="steady", num_bytes=num_bytes, reason=reason))

    @classmethod
    def in_flight(cls, layout: Layout, index: int, usual: Column) -> Column:
        passes = layout.pp - 1 - index + (layout.virtual_stages - 1) * layout.pp + 1
        return 0 * usual + min(passes, layout.num_micro_batches * layout.virtual_stages)

    @classmethod
    def logits_held(cls, layout: Layout) -> int:
        return 1
