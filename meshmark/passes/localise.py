"""Train a failed case again, and find the module in which it begins to deviate."""

from __future__ import annotations

import time

import torch.distributed as dist

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.data_parallel import DataParallelEngine
from meshmark.adapter.engine import Engine, RankContext
from meshmark.errors import AdapterError
from meshmark.judge.beginning import Beginning, Recorder, first_deviation
from meshmark.judge.engine_tensors import host_parameters
from meshmark.judge.gather import all_gather_json
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request
from meshmark.reference.data import make_batch


def localise(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train up to `request.steps` steps, and stop after the first in which some rank deviates."""
    engine = adapter.build(request.case, context)
    built = time.time()
    found = begins(engine, request, context.rank)
    engine.close()
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        beginning=found,
    )


def begins(engine: Engine, request: Request, rank: int) -> Beginning | None:
    """Return where this rank first deviates, in the first step in which any does; None where it does in none.

    Raises `AdapterError` for an engine whose ranks do not each run the whole model, and in 16 bits.
    """
    case = request.case
    if case.precision.is_mixed:
        raise AdapterError(
            f"modules are compared in fp32 and fp64, for 16 bits round too much: this case is in {case.precision}"
        )
    if not isinstance(engine, DataParallelEngine) or case.layout.tp * case.layout.pp * case.layout.cp > 1:
        raise AdapterError(
            f"{case.adapter}: modules are compared where every rank runs the whole model; this one's do not"
        )
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        batch, before = make_batch(case.workload, step), host_parameters(engine, case.workload)
        with Recorder(engine.inner()) as recorder:
            engine.backward(batch)
        if not recorder.calls:
            raise AdapterError(
                f"{case.adapter}: the model was not called as a whole, so its modules cannot be compared"
            )
        found = first_deviation(recorder.calls, before, case, rank, step)
        engine.update()
        rank_progress.advance()
        if any(all_gather_json(found is not None)) if dist.is_initialized() else found:
            return found
    return None
