"""The profiled pass: some steps after warm-up, each waited for to its end; slower than untouched ones."""

from __future__ import annotations

import time
from pathlib import Path

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.measure.profiler import profile_steps
from meshmark.reference.data import make_batch
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request


def profile(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """`request.steps` steps under the profiler; the first rank leaves its trace in `request.traces`."""
    engine = adapter.build(request.case, context)
    built, workload, losses = time.time(), request.case.workload, list[float]()
    rank_progress.begin(rank_progress.Phase.TRAIN, request.warmup + request.steps)
    batches = [make_batch(workload, step) for step in range(request.warmup + request.steps)]
    for batch in batches[: request.warmup]:
        losses.append(float(engine.step(batch)))
        rank_progress.advance()

    def step(number: int) -> None:
        losses.append(float(engine.step(batches[number])))
        rank_progress.advance()

    trace = Path(request.traces) if request.traces and context.rank == 0 else None
    found = profile_steps(step, range(request.warmup, len(batches)), context.device, trace)
    engine.close()
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=losses,
        profile=found,
    )
