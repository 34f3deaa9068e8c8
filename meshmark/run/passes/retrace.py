"""The instrumented pass's steps again, without meters and without the truth: what losses and parameters it makes."""

from __future__ import annotations

import time

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.judge.replicas import replicas_of_ranks
from meshmark.judge.trace import gather_replicas
from meshmark.run.passes.observer import Observer, digests
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request


def retrace(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """`losses` and `digests` of `request.steps` steps by `backward` and `update`, each read as the instrumented pass
    reads it."""
    engine = adapter.build(request.case, context)
    built, observer = time.time(), Observer(engine, request)
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        observer.train(step)
    engine.close()
    traces, _, _ = gather_replicas(observer.trace, replicas_of_ranks(request.case))
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=observer.trace.losses,
        digests=digests(traces),
    )
