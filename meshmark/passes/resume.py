"""Save halfway, go on; and in other processes, go on from what was saved."""

from __future__ import annotations

import dataclasses
import pickle
import time
from pathlib import Path

import torch.distributed as dist

from meshmark.adapter import Adapter, RankContext
from meshmark.diagnosis import diagnose
from meshmark.passes.diary import Diary, digests
from meshmark.rank_report import RankReport, Request
from meshmark.trace import Trace, gather_trace
from meshmark.truth import assess

_TRACE = "meshmark-trace.pickle"


def save_halfway(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps, and leave a checkpoint after half of them, with the trace up to there."""
    folder = Path(request.checkpoint)
    engine = adapter.build(request.case, context)
    built, diary = time.time(), Diary(engine, request)
    for step in range(halfway(request)):
        diary.train(step)
    engine.save(folder)
    so_far, _, _ = gather_trace(diary.trace)
    if so_far:
        (folder / _TRACE).write_bytes(pickle.dumps(so_far))
    for step in range(halfway(request), request.steps):
        diary.train(step)
    engine.close()
    trace, drifts, _ = gather_trace(diary.trace)
    return RankReport(
        rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built, losses=diary.trace.losses,
        drifts=drifts, digests=digests(trace) if trace else [],
    )  # fmt: skip


def resume(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Load what `save_halfway` left and train the other half; both halves together are one run to be judged."""
    folder, half = Path(request.checkpoint), halfway(request)
    engine = adapter.build(request.case, context)
    built = time.time()
    engine.load(folder)
    diary = Diary(engine, request)
    for step in range(half, request.steps):
        diary.train(step)
    engine.close()
    second, drifts, _ = gather_trace(diary.trace)
    dist.barrier()
    report = RankReport(
        rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built, losses=diary.trace.losses,
        drifts=[dataclasses.replace(drift, step=drift.step + half) for drift in drifts],
    )  # fmt: skip
    if second is None:
        return report
    whole = _join(pickle.loads((folder / _TRACE).read_bytes()), second)
    deviations = assess(whole, request.case.workload)
    diagnosis = (
        diagnose(request.case, whole, deviations, report.drifts, request.yardstick) if request.yardstick else None
    )
    return dataclasses.replace(report, deviations=deviations, diagnosis=diagnosis, digests=digests(second))


def halfway(request: Request) -> int:
    return request.steps // 2


def _join(first: Trace, second: Trace) -> Trace:
    """One run of two halves; where they meet, the parameters are those that were loaded."""
    return Trace(
        parameters=first.parameters[:-1] + second.parameters, gradients=first.gradients + second.gradients,
        losses=first.losses + second.losses, norms=first.norms + second.norms,
    )  # fmt: skip
