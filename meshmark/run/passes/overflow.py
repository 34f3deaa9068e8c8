"""fp16: the gradients of one rank overflow in one step, which every rank must then leave out."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.judge.engine_tensors import host_parameters
from meshmark.judge.trace import gather_trace
from meshmark.judge.truth import assess
from meshmark.reference.data import make_batch
from meshmark.run.passes.observer import Observer, digests
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request

OVERFLOWS_BEFORE = 1
"""The step before which the overflow comes."""


def overflow(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps, and between two of them one whose loss is divided by zero on the last rank. `moved`:
    how many of this rank's parameters that step changed. The others must be as if it had not been."""
    engine = adapter.build(request.case, context)
    built, observer = time.time(), Observer(engine, request)
    moved = 0
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        if step == OVERFLOWS_BEFORE:
            batch = make_batch(request.case.workload, request.steps)
            last = context.rank == context.world_size - 1
            engine.backward(dataclasses.replace(batch, total_weight=0) if last else batch)
            engine.update()
            before, after = observer.trace.parameters[-1], host_parameters(engine, request.case.workload)
            moved = sum(not np.array_equal(before[name], after[name]) for name in before)
        observer.train(step)
    engine.close()
    trace, drifts, num_replicated = gather_trace(observer.trace)
    deviations = assess(trace, request.case.workload, layout=request.case.layout) if trace else {}
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=observer.trace.losses,
        norms=observer.trace.norms,
        deviations=deviations,
        drifts=drifts,
        num_replicated=num_replicated,
        left_out=observer.left_out,
        samples={"moved": [float(moved)]},
        digests=digests([trace]) if trace else [],
    )
