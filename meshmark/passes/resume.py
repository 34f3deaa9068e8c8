"""Save a checkpoint halfway, then continue or lose a rank; and continue from the checkpoint in other processes."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.judge.deviation import Deviations, Drift, replicas_of_ranks
from meshmark.judge.faults import Diagnosis
from meshmark.judge.replica_diagnosis import diagnose_replicas
from meshmark.judge.trace import Trace, gather_replicas
from meshmark.judge.truth import assess_replicas
from meshmark.passes.judging import judge
from meshmark.passes.observe import Observer, digests
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request

TRACE = "meshmark-trace.pickle"


def save_halfway(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps, and save a checkpoint after half of them, with the trace so far."""
    engine, observer, built = _first_half(request, adapter, context)
    for step in range(halfway(request), request.steps):
        observer.train(step)
    engine.close()
    together, replicas = request.case.workload.algorithm.replicas_agree, replicas_of_ranks(request.case)
    traces, drifts, _ = gather_replicas(observer.trace, replicas, together)
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=observer.trace.losses,
        drifts=drifts,
        digests=digests(traces),
    )


def lose_a_rank(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Save halfway, train one more step, and kill the last rank.

    The step is lost with it, and only what is on disk is left to continue from. No rank reaches its end.
    """
    _, observer, built = _first_half(request, adapter, context)
    observer.train(halfway(request))
    if context.rank == context.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(halfway(request) + 1, request.steps):
        observer.train(step)
    return RankReport(rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built)


def _first_half(request: Request, adapter: Adapter, context: RankContext) -> tuple[Engine, Observer, float]:
    """Train the first half and save it. Return the engine, the observer and the time when the engine was built."""
    folder = Path(request.checkpoint)
    engine = adapter.build(request.case, context)
    built, observer = time.time(), Observer(engine, request)
    rank_progress.begin(rank_progress.Phase.TRAIN, halfway(request))
    for step in range(halfway(request)):
        observer.train(step)
    engine.save(folder)
    so_far, _, _ = gather_replicas(observer.trace, replicas_of_ranks(request.case))
    if so_far:
        (folder / TRACE).write_bytes(pickle.dumps(so_far))
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps - halfway(request))
    return engine, observer, built


def resume(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Load the first half's checkpoint and train the other half. Both halves are judged as one run."""
    folder, half = Path(request.checkpoint), halfway(request)
    engine = adapter.build(request.case, context)
    built = time.time()
    engine.load(folder)
    observer = Observer(engine, request)
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps - half)
    for step in range(half, request.steps):
        observer.train(step)
    engine.close()
    together = request.case.workload.algorithm.replicas_agree
    second, drifts, _ = gather_replicas(observer.trace, replicas_of_ranks(request.case), together)
    dist.barrier()
    report = RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=observer.trace.losses,
        drifts=[dataclasses.replace(drift, step=drift.step + half) for drift in drifts],
    )
    if not second:
        return report
    first: list[Trace] = pickle.loads((folder / TRACE).read_bytes())
    whole = [_join(*halves) for halves in zip(first, second, strict=True)]
    judged = judge(request, _assess, context, whole, report.drifts)
    deviations, diagnosis = judged.found
    return dataclasses.replace(
        report,
        deviations=deviations,
        diagnosis=diagnosis,
        digests=digests(second),
        replaced=judged.replaced,
        misled=judged.misled,
    )


def _assess(request: Request, whole: Sequence[Trace], drifts: Sequence[Drift]) -> tuple[Deviations, Diagnosis | None]:
    """Compare both halves with the truth as one run, and diagnose it if it is wrong."""
    case, tolerance_model = request.case, request.tolerance_model
    deviations = assess_replicas(whole, case.workload, layout=case.layout)
    diagnosis = diagnose_replicas(case, whole, deviations, drifts, tolerance_model) if tolerance_model else None
    return deviations, diagnosis


def halfway(request: Request) -> int:
    return request.steps // 2


def _join(first: Trace, second: Trace) -> Trace:
    """Join two halves to one run. Where they meet, the parameters are those that were loaded."""
    return Trace(
        parameters=first.parameters[:-1] + second.parameters,
        gradients=first.gradients + second.gradients,
        losses=first.losses + second.losses,
        norms=first.norms + second.norms,
        buffers=[a[:-1] + b for a, b in zip(first.buffers, second.buffers, strict=True)],
        left_out=first.left_out + second.left_out,
        loss_scales=first.loss_scales + second.loss_scales,
        versions=first.versions + second.versions,
        drifted=second.drifted,
    )
