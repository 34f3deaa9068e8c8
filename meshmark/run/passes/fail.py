"""One rank raises an error while the others train on."""

from __future__ import annotations

import time

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.reference.data import make_batch
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request

MESSAGE = "raised on purpose, to see it end the case"
FAILS_AT = 1


def fail(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train; the last rank raises `RuntimeError` in step FAILS_AT."""
    engine = adapter.build(request.case, context)
    built, losses = time.time(), []
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        if step == FAILS_AT and context.rank == context.world_size - 1:
            raise RuntimeError(MESSAGE)
        losses.append(float(engine.step(make_batch(request.case.workload, step))))
        rank_progress.advance()
    return RankReport(rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built, losses=losses)
