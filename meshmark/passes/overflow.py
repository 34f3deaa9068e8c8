"""fp16: the gradients of one rank overflow in one step, which every rank must then leave out."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from meshmark.adapter import Adapter, RankContext
from meshmark.data import make_batch
from meshmark.passes.diary import Diary, digests
from meshmark.rank_report import RankReport, Request
from meshmark.trace import gather_trace, note
from meshmark.truth import assess

OVERFLOWS_BEFORE = 1
"""The step before which the overflow comes."""


def overflow(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps, and between two of them one whose loss is divided by zero on the last rank. `moved`:
    how many of this rank's parameters that step changed. The others must be as if it had not been."""
    engine = adapter.build(request.case, context)
    built, diary = time.time(), Diary(engine, request)
    moved = 0
    for step in range(request.steps):
        if step == OVERFLOWS_BEFORE:
            batch = make_batch(request.case.workload, request.steps)
            last = context.rank == context.world_size - 1
            engine.backward(dataclasses.replace(batch, num_tokens=0) if last else batch)
            engine.update()
            before, after = diary.trace.parameters[-1], note(engine.parameters())
            moved = sum(not np.array_equal(before[name], after[name]) for name in before)
        diary.train(step)
    engine.close()
    trace, drifts, num_replicated = gather_trace(diary.trace)
    deviations = assess(trace, request.case.workload) if trace else {}
    return RankReport(
        rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built, losses=diary.trace.losses,
        norms=diary.trace.norms, deviations=deviations, drifts=drifts, num_replicated=num_replicated,
        samples={"moved": [float(moved)]}, digests=digests(trace) if trace else [],
    )  # fmt: skip
