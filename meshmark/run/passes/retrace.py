"""The instrumented pass's steps again, without meters and without the truth, and on: what losses and parameters come of
them."""

from __future__ import annotations

import time

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.judge.deviation import Tensors
from meshmark.judge.engine_tensors import host_parameters
from meshmark.judge.replicas import replicas_of_ranks
from meshmark.judge.trace import Trace, gather_replicas
from meshmark.reference.data import make_batch
from meshmark.run.passes.observer import Observer, digests
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request


def retrace(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """By `backward` and `update`: `losses` of all steps up to the last mark; `digests` of the first `request.steps`,
    each read as the instrumented pass reads it; `timed_digests` at marks beyond these. Each batch is trained on once,
    as the clock does, also where loss scaling leaves its step out."""
    engine = adapter.build(request.case, context)
    built, observer = time.time(), Observer(engine, request, retries=False)
    num_steps, beyond = max([request.steps, *request.marks]), [mark for mark in request.marks if mark > request.steps]
    rank_progress.begin(rank_progress.Phase.TRAIN, num_steps)
    for step in range(request.steps):
        observer.train(step)
    losses, later = observer.trace.losses, list[Tensors]()
    for step in range(request.steps, num_steps):
        losses.append(float(engine.backward(make_batch(request.case.workload, step))))
        engine.update()
        if step + 1 in beyond:
            later.append(host_parameters(engine, request.case.workload))
        rank_progress.advance()
    engine.close()
    traces, _, _ = gather_replicas(observer.trace, replicas_of_ranks(request.case))
    ends, _, _ = gather_replicas(Trace(parameters=later), replicas_of_ranks(request.case))
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=losses,
        digests=digests(traces),
        left_out=observer.left_out,
        timed_digests=dict(zip(beyond, digests(ends), strict=True)) if ends else {},
    )
