"""The pass that measures a noise floor: its runs whole, or of a large model by a sample, with their tensors on disk."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import time
from pathlib import Path
from typing import cast

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.adapter.single import SingleEngine
from meshmark.judge.piecewise import all_cores, assess_pieces
from meshmark.judge.stored import stored_copies
from meshmark.judge.tolerance_model import Comparisons, noise_run
from meshmark.judge.trace import Trace
from meshmark.reference.data import make_batch
from meshmark.run.passes.noise import (
    NUM_RUNS,
    backward,
    num_chunks,
    num_ways,
    permute,
    perturb,
    ranks_that_round,
    train_alone,
)
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request
from meshmark.spec.layout import Layout


def measure_noise(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Noise of `request.case`'s workload and precision over this rank's share of the runs; `adapter` is `single`."""
    alone, sample = dataclasses.replace(context, rank=0, world_size=1), request.sample
    runs = range(context.rank, sample.noise_runs if sample else NUM_RUNS, context.world_size)
    if sample:
        noise_runs = [_train_sampled(request, adapter, alone, run, context.world_size) for run in runs]
    else:
        noise_runs = [train_alone(request, adapter, alone, run) for run in runs]
    return RankReport(rank=context.rank, build_seconds=0.0, run_seconds=time.time() - started, noise_runs=noise_runs)


def _train_sampled(
    request: Request, adapter: Adapter, context: RankContext, run: int, num_processes: int
) -> Comparisons:
    """One noise run of a large model, as `train_alone` does it of a small one, beside those of other processes."""
    folder = context.scratch / f"run-{run}"
    assert request.sample
    try:
        trace = _trace(request, adapter, context, run, request.sample.steps, folder)
        gc.collect()  # the engine's memory is the truth's from here on
        with all_cores(share=num_processes):
            deviations = assess_pieces(trace, request.case.workload, trace.parameters[0], context.device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return noise_run(deviations, request.case.precision)


def _trace(request: Request, adapter: Adapter, context: RankContext, run: int, num_steps: int, folder: Path) -> Trace:
    workload, num_ranks = request.case.workload, ranks_that_round(request.case)
    layout = Layout(num_micro_batches=num_chunks(request.case))
    case = dataclasses.replace(request.case, adapter="single", layout=layout)
    engine = cast(SingleEngine, adapter.build(case, context))
    engine.cast_weights = bool(run % num_ways(case))
    perturb(engine, case, run)
    trace = Trace(parameters=[stored_copies(engine.parameters(), folder / "parameters-0")])
    rank_progress.begin(rank_progress.Phase.TRAIN, num_steps)
    for step in range(num_steps):
        loss, _ = backward(engine, permute(make_batch(workload, step), case, run, num_ranks), num_ranks)
        trace.losses.append(loss)
        trace.gradients.append(stored_copies(engine.gradients(), folder / f"gradients-{step}"))
        norm = engine.update()
        trace.norms.append(None if norm is None else float(norm))
        trace.parameters.append(stored_copies(engine.parameters(), folder / f"parameters-{step + 1}"))
        rank_progress.advance()
    return trace
