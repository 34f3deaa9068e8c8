"""The instrumented pass: what a rank computes, holds and sends."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import torch

from meshmark.adapter import Adapter, Engine, Holdings, RankContext
from meshmark.data import make_batch
from meshmark.meters.deviation import Deviation, measure
from meshmark.meters.memory import Named, cuda_peaks, read_memory
from meshmark.meters.traffic import read_traffic
from meshmark.meters.watch import Watch
from meshmark.rank_report import RankReport, Request
from meshmark.reference import Truth, load_truth

WATCHED_STEP = 2
"""The step whose memory and traffic are read: the first builds optimizer states, the second settles caches."""


@dataclass
class _Diary:
    """What one rank writes down step by step."""

    engine: Engine
    request: Request
    truth: Truth | None
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, Deviation]] = field(default_factory=list)
    parameters: list[dict[str, Deviation]] = field(default_factory=list)

    def train(self, step: int, watch: Watch | None) -> tuple[Named, Named]:
        """One step; returns what the engine holds before and after its update."""
        batch = make_batch(self.request.case.workload, step)
        with _window(watch, "backward", step):
            loss = self.engine.backward(batch)
        before = Named.of(self.engine.holdings())
        if self.truth:
            self.gradients.append(measure(self.engine.gradients(), self.truth.gradients[step]))
        with _window(watch, "update", step):
            norm = self.engine.update()
        after = Named.of(self.engine.holdings())
        self.losses.append(float(loss))
        self.norms.append(None if norm is None else float(norm))
        if self.truth:
            self.parameters.append(measure(self.engine.parameters(), self.truth.parameters[step]))
        return before, after


def observe(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps, the first few under watch, and compare every tensor with the truth where there is
    one."""
    truth = load_truth(request.truth) if request.truth else None
    with Watch(context.device) as watch:
        engine = adapter.build(request.case, context)
        built = time.time()
        diary = _Diary(engine, request, truth)
        for step in range(WATCHED_STEP):
            diary.train(step, watch)
        if context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(context.device)
        before, after = diary.train(WATCHED_STEP, watch)
        allocator_peaks = cuda_peaks(context.device)
    memory = read_memory(watch, WATCHED_STEP, before, after, allocator_peaks)
    traffic = read_traffic(watch, WATCHED_STEP)
    for step in range(WATCHED_STEP + 1, request.steps):
        diary.train(step, None)
    dtypes = _dtypes(engine.holdings())
    engine.close()
    return RankReport(
        rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built,
        losses=diary.losses, norms=diary.norms, gradients=diary.gradients, parameters=diary.parameters,
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
