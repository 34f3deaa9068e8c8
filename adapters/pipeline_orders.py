"""Pipelines of several stages a rank in PyTorch's other orders than interleaved 1F1B: looped breadth-first, with a zero
bubble, and folded into a V, so that the first rank holds both ends."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshmark.adapter.contract import Feature
from meshmark.adapters.pipeline import NO_IMAGES, Pipeline
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Layout, Schedule
from meshmark.theory.activations import num_in_flight, passes_in_flight_bytes
from meshmark.theory.grid import Column, layout_grid
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import theory_of

_INPUTS = "gradients of stages' inputs are kept until the next step, for the backward pass is in two parts"

_EVALUATED = (
    "its schedule cannot evaluate: between two stages of one rank it hands over gradients in `eval` too, where there "
    "are none"
)
_HANDED = "outputs, and their gradients, that go from one stage to the next on the same rank stay until the next step"


class LoopedBFS(Pipeline):
    """Looped breadth-first (arXiv:2211.05953): all micro-batches of a stage, then all of the rank's next stage.

    The activations of all are held when the backward passes begin.
    """

    capabilities: ClassVar = dataclasses.replace(
        Pipeline.capabilities,
        schedules=frozenset({Schedule.INTERLEAVED}),
        virtual_stages=frozenset({2}),
        families=Pipeline.capabilities.families - NO_IMAGES.keys(),
        lacks={**Pipeline.capabilities.lacks, **NO_IMAGES},
    )
    interleaving: ClassVar = "LoopedBFS"

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return how the activations in flight differ from 1F1B's, and the logits that the last rank holds."""
        layout, index = case.layout, case.layout.coordinates(rank).pp
        model, using = theory_of(case.workload.model).transformer, cls.recipe(case)
        if model is None:  # whose activations are not planned in chunks
            return super().extra_memory(case, rank)
        grid = layout_grid(layout, case.workload.global_batch)
        usual = num_in_flight(grid, index)
        own, theirs = (
            float(passes_in_flight_bytes(model, grid, using, index, flight)[0])
            for flight in (cls.in_flight(layout, index, usual), usual)
        )
        reason = f"{cls.interleaving} has other micro-batches in flight than interleaved 1F1B"
        count = cls.logits_held(layout)
        logits = [dataclasses.replace(r, num_bytes=r.num_bytes * count) for r in super().extra_memory(case, rank)]
        return (*logits, ExtraMemory(category="activations", num_bytes=own - theirs, reason=reason))

    @classmethod
    def in_flight(cls, layout: Layout, index: int, usual: Column) -> Column:
        """Forward passes, of a chunk each, before the first backward pass."""
        return 0 * usual + layout.num_micro_batches * layout.virtual_stages

    @classmethod
    def logits_held(cls, layout: Layout) -> int:
        """Return the number of micro-batches whose logits are held when the first backward pass begins."""
        return layout.num_micro_batches


class InterleavedZeroBubble(LoopedBFS):
    """ZB1P (arXiv:2401.10241): gradients of weights are computed late, where the bubble was, and half as many
    micro-batches as in 1F1B start ahead of a rank's successors."""

    interleaving: ClassVar = "InterleavedZeroBubble"

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        layout, width = case.layout, case.precision.wide.itemsize
        stages = [stage for stage in layout.stages_of(layout.coordinates(rank).pp) if stage]
        num_bytes = layout.num_micro_batches * width * sum(_received(case, stage) for stage in stages)
        return (*super().extra_memory(case, rank), ExtraMemory(category="steady", num_bytes=num_bytes, reason=_INPUTS))

    @classmethod
    def in_flight(cls, layout: Layout, index: int, usual: Column) -> Column:
        passes = layout.pp - 1 - index + (layout.virtual_stages - 1) * layout.pp + 1
        return 0 * usual + min(passes, layout.num_micro_batches * layout.virtual_stages)

    @classmethod
    def logits_held(cls, layout: Layout) -> int:
        return 1


class ZeroBubbleV(Pipeline):
    """ZB-V (arXiv:2401.10241 sec. 6): stages i and 2p - 1 - i lie together, weights' gradients fill the bubble."""

    capabilities: ClassVar = dataclasses.replace(
        Pipeline.capabilities,
        schedules=frozenset({Schedule.INTERLEAVED}),
        virtual_stages=frozenset({2}),
        folded=True,
        families=Pipeline.capabilities.families - NO_IMAGES.keys(),
        lacks={
            **Pipeline.capabilities.lacks,
            **NO_IMAGES,
            Feature.TIED_EMBEDDINGS: "one rank would hold the weight in both of its stages; not mapped",
        },
    )
    known_gaps: ClassVar = tuple(
        KnownGap(
            clause=clause,
            symptom="can't steal_bwd_input",
            reason=_EVALUATED,
            reproducer="pipelining_v_schedules_evaluate",
        )
        for clause in ("evaluation", "clipping", "dropout", "recomputed dropout")
    )
    interleaving: ClassVar = "ZBVZeroBubble"

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        layout = case.layout
        if layout.folded and layout.num_micro_batches < 2 * layout.pp:
            return f"a V takes twice as many micro-batches as ranks, got {layout.num_micro_batches} for pp {layout.pp}"
        return super().supports(case, device, backend)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """The first stage's inputs have no gradients; those of a stage after one on the same rank are handed over."""
        layout, width = case.layout, case.precision.wide.itemsize
        index = layout.coordinates(rank).pp
        first, second = layout.stages_of(index)
        counts, together = cls.in_two_parts(layout, index), second == first + 1
        inputs = counts[0] * (_received(case, first) if first else 0) + counts[1] * (
            0 if together else _received(case, second)
        )
        handed = 2 * layout.num_micro_batches * width * (_received(case, second) if together else 0)
        return (
            ExtraMemory(category="steady", num_bytes=inputs * width, reason=_INPUTS),
            *([ExtraMemory(category="steady", num_bytes=handed, reason=_HANDED)] if handed else []),
        )

    @classmethod
    def in_two_parts(cls, layout: Layout, index: int) -> tuple[int, int]:
        """Return, for a rank's stages, the numbers of backward passes that compute the gradients of weights later."""
        return layout.num_micro_batches, layout.num_micro_batches


class DualPipeV(ZeroBubbleV):
    """DualPipe (arXiv:2412.19437 sec. 3.2.1) folded into a V: forward passes of one stage beside backward passes of the
    other."""

    interleaving: ClassVar = "DualPipeV"

    @classmethod
    def in_two_parts(cls, layout: Layout, index: int) -> tuple[int, int]:
        """Where the bubble is: while a rank waits for those after it, and in the second half of its last passes."""
        after = layout.pp - 1 - index
        return after + (index + 2) // 2, after + (index + 1) // 2


def _received(case: Case, stage: int) -> int:
    """Return how many numbers of one micro-batch a stage is given by the one before it."""
    layout, workload = case.layout, case.workload
    rows = workload.global_batch // (layout.dp * layout.num_micro_batches)
    each = theory_of(workload.model).boundary_numbers(layout.pp * layout.virtual_stages, stage - 1)
    return rows * (each or 0)
