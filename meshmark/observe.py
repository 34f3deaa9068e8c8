"""The instrumented pass: what a rank computes, holds and sends."""

from __future__ import annotations

import contextlib
import time

import torch

from meshmark.adapter import Adapter, Engine, Holdings, RankContext
from meshmark.data import make_batch
from meshmark.diagnosis import diagnose
from meshmark.meters.memory import Named, cuda_peaks, read_memory, visible_storages
from meshmark.meters.traffic import read_traffic
from meshmark.meters.watch import Watch
from meshmark.rank_report import RankReport, Request
from meshmark.trace import Trace, gather_trace, note
from meshmark.truth import assess

WATCHED_STEP = 2
"""The step whose memory and traffic are read: the first builds optimizer states, the second settles caches."""


class _Diary:
    """Trains an engine and takes notes."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request = engine, request
        self.trace = Trace()
        if request.assess:
            self.trace.parameters.append(note(engine.parameters()))

    def train(self, step: int, watch: Watch | None) -> tuple[Named, Named]:
        """One step; returns what the engine holds before and after its update."""
        batch = make_batch(self.request.case.workload, step)
        with _window(watch, "backward", step):
            loss = self.engine.backward(batch)
        before = Named.of(self.engine.holdings())
        if self.request.assess:
            self.trace.gradients.append(note(self.engine.gradients()))
        with _window(watch, "update", step):
            norm = self.engine.update()
        after = Named.of(self.engine.holdings())
        self.trace.losses.append(float(loss))
        self.trace.norms.append(None if norm is None else float(norm))
        if self.request.assess:
            self.trace.parameters.append(note(self.engine.parameters()))
        return before, after


def observe(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps (at least three), the first of them under watch; then compare all that the ranks
    computed with the truth, on rank 0."""
    with Watch(context.device) as watch:
        engine = adapter.build(request.case, context)
        built = time.time()
        diary = _Diary(engine, request)
        for step in range(WATCHED_STEP):
            diary.train(step, watch)
        watch.focus()
        if context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(context.device)
        before, after = diary.train(WATCHED_STEP, watch)
        allocator_peaks = cuda_peaks(context.device)
        visible = visible_storages()
    memory = read_memory(watch, WATCHED_STEP, before, after, visible, allocator_peaks)
    traffic = read_traffic(watch, WATCHED_STEP)
    for step in range(WATCHED_STEP + 1, request.steps):
        diary.train(step, None)
    dtypes = _dtypes(engine.holdings())
    engine.close()
    trace, drifts = gather_trace(diary.trace)
    deviations = assess(trace, request.case.workload) if trace and request.assess else {}
    diagnosis = None
    if trace and deviations and request.yardstick:
        diagnosis = diagnose(request.case, trace, deviations, drifts, request.yardstick)
    return RankReport(
        rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built,
        losses=diary.trace.losses, norms=diary.trace.norms, deviations=deviations, drifts=drifts,
        diagnosis=diagnosis,
        memory=memory, traffic=traffic, state_dtypes=dtypes,
    )  # fmt: skip


def _window(watch: Watch | None, name: str, step: int) -> contextlib.AbstractContextManager[None]:
    return watch.window(name, step) if watch else contextlib.nullcontext()


def _dtypes(held: Holdings) -> dict[str, str]:
    """The precisions in which an engine holds its states: "float32", or several joined by +."""
    return {
        name: "+".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.numel() > 1}))
        for name, tensors in (("parameters", held.parameters), ("optimizer_states", held.optimizer_states))
    }
