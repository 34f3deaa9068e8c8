"""Run the instrumented pass: what a rank computes and, if it is metered, what it holds and sends."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.holdings import Holdings
from meshmark.adapter.traffic_source import TrafficSource
from meshmark.errors import TrafficError
from meshmark.judge.deviation import Deviations, Tensors
from meshmark.judge.engine_tensors import host_parameters
from meshmark.judge.gradient_faults import low_precisions
from meshmark.judge.piecewise import all_cores, assess_pieces
from meshmark.judge.replica_diagnosis import diagnose_replicas
from meshmark.judge.replicas import replicas_of_ranks
from meshmark.judge.sample_diagnosis import diagnose_sample
from meshmark.judge.stored import DiskNotebook
from meshmark.judge.trace import Trace, gather_replicas
from meshmark.judge.truth import assess_replicas
from meshmark.judge.twin import Twin, twin_of
from meshmark.measure.extra_peak import ExtraPeak
from meshmark.measure.memory import read_memory
from meshmark.measure.readings import MemoryReading, StepReadings, TrafficReading
from meshmark.measure.traffic import TorchTraffic, alike_steps, read_traffic
from meshmark.measure.watch import Watch
from meshmark.passes.observer import Notebook, Observer, digests
from meshmark.passes.tuned import compile_seconds, expect_tuned
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request, Task
from meshmark.reference.data import make_batch
from meshmark.spec.workload import Workload
from meshmark.theory.traffic import METERED_STEP

WATCHED_STEP = METERED_STEP
"""The step whose memory and traffic are read.

The first step builds optimizer states, and the second settles caches.
"""


def observe(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps (at least three), then compare everything that the ranks computed with the truth on
    rank 0.

    The first steps are watched if the pass is metered.
    """
    beside = ExtraPeak(context.device)
    notebook = DiskNotebook(context.scratch / f"trace-{context.rank}", beside) if request.sample else None
    seen = _train(request, adapter, context, notebook)
    gc.collect()  # the engine's memory is the truth's from here on
    replicas = replicas_of_ranks(request.case)
    together = request.case.workload.algorithm.replicas_agree
    traces, drifts, num_replicated = (
        notebook.gather(seen.trace) if notebook else gather_replicas(seen.trace, replicas, together)
    )
    twin = None if request.sample else twin_of(request.case, adapter.arithmetic, context.device)
    deviations = _assess(request, traces, context, twin) if traces and request.assess else {}
    diagnosis = None
    if deviations and request.sample and request.tolerance_model:
        diagnosis = diagnose_sample(deviations, drifts, request.tolerance_model)
    elif deviations and request.tolerance_model:
        diagnosis = diagnose_replicas(request.case, traces, deviations, drifts, request.tolerance_model, twin)
    return RankReport(
        rank=context.rank,
        build_seconds=seen.built - started,
        run_seconds=time.time() - seen.built,
        losses=seen.trace.losses,
        norms=seen.trace.norms,
        deviations=deviations,
        drifts=drifts,
        diagnosis=diagnosis,
        memory=seen.memory,
        traffic=seen.traffic,
        steps=seen.steps,
        state_dtypes=seen.dtypes,
        digests=digests(traces),
        num_replicated=num_replicated,
        gathering_bytes=beside.num_bytes,
        left_out=seen.left_out,
        kernels=seen.tuned,
        compile_seconds=compile_seconds(request.case),
        unmeasured=seen.unmeasured,
    )


def observe_alone(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps as one rank of a fake world, and report its memory and traffic.

    Nothing else has a meaning in a fake world.
    """
    seen = _train(request, adapter, context, None)
    return RankReport(
        rank=context.rank,
        build_seconds=seen.built - started,
        run_seconds=time.time() - seen.built,
        memory=seen.memory,
        traffic=seen.traffic,
        steps=seen.steps,
        state_dtypes=seen.dtypes,
        unmeasured=seen.unmeasured,
    )


@dataclass(frozen=True, kw_only=True)
class _RunResults:
    """The results of a run after its engine is closed."""

    trace: Trace
    built: float
    """Time when the engine was built."""
    memory: MemoryReading | None
    traffic: TrafficReading | None
    steps: StepReadings | None
    dtypes: dict[str, str]
    left_out: int
    tuned: dict[str, str]
    unmeasured: dict[str, str]


def _train(request: Request, adapter: Adapter, context: RankContext, notebook: Notebook | None) -> _RunResults:
    make_batch(request.case.workload, 0)  # reads the data set, which is ours and stays: it is not to count
    watch = Watch(context.device) if request.metered else None
    with watch or contextlib.nullcontext():
        engine = adapter.build(request.case, context)
        if request.task is Task.FAKE_WORLD:
            engine.enter_fake_world()
        built = time.time()
        rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
        observer = Observer(engine, request, notebook=notebook)
        meter = functools.partial(_sources, watch, engine) if watch else tuple
        sources = list[Sequence[TrafficSource]]()
        for step in range(request.steps):
            if watch and step == 0:
                watch.follow()
            if watch and step == WATCHED_STEP:
                watch.focus()
            holdings = observer.train(step, watch, meter)
            sources.append(observer.sources)
            if step == WATCHED_STEP:
                before, after = holdings
                if watch:
                    watch.rest()
    memory = None
    if watch and not observer.unheld:
        memory = read_memory(watch, WATCHED_STEP, before, after)
    traffic, missing_failures = _traffic(sources[WATCHED_STEP]) if watch else (None, "")
    tuned = expect_tuned(engine, request.case, context.device, request.steps)
    dtypes = _dtypes(observer.holdings()) | _formats(observer.trace, request.case.workload)
    engine.close()
    return _RunResults(
        trace=observer.trace,
        built=built,
        memory=memory,
        traffic=traffic,
        steps=_steps(watch, sources) if watch else None,
        dtypes=dtypes,
        left_out=observer.left_out,
        tuned=tuned,
        unmeasured={
            suite: why for suite, why in (("memory", observer.unheld), ("communication", missing_failures)) if why
        },
    )


def _assess(request: Request, traces: Sequence[Trace], context: RankContext, twin: Twin | None) -> Deviations:
    """Return the deviations from the truth.

    Those of a sample are computed on the run's device and on all cores, which the other ranks no longer need.
    """
    workload = request.case.workload
    if request.sample is None:
        return assess_replicas(traces, workload, layout=request.case.layout, twin=twin)
    with all_cores():
        return assess_pieces(traces[0], workload, device=context.device)


def _sources(watch: Watch, engine: Engine) -> list[TrafficSource]:
    """Return PyTorch's traffic source, and the engine's own source if it has one."""
    own = engine.traffic_source()
    return [TorchTraffic(watch)] + ([own] if own else [])


def _traffic(sources: Sequence[TrafficSource]) -> tuple[TrafficReading | None, str]:
    """Return the traffic, or the reason why it cannot be read. Other measurements do not depend on it."""
    try:
        return read_traffic(sources), ""
    except TrafficError as error:
        return None, str(error)


def _steps(watch: Watch, sources: Sequence[Sequence[TrafficSource]]) -> StepReadings:
    """Return what is known of every step, not only of the watched one."""
    try:
        sent, failure = alike_steps(sources), ""
    except TrafficError as error:
        sent, failure = [], str(error)
    return StepReadings(live_bytes=watch.live_bytes(), sent=sent, failure=failure)


def _formats(trace: Trace, workload: Workload) -> dict[str, str]:
    """Return the number formats that values use on this rank, whatever dtype they are stored in.

    `gradients` is the format of all gradients together: sums over ranks and sequences take more digits than bf16 has.
    `masters` gives the formats of the trained parameters. After some small updates they use every digit of the format
    in which they are stored.
    """
    found = {"gradients": _format(g for tensors in trace.gradients for g in tensors.values())}
    last = trace.parameters[-1] if trace.parameters else {}
    trained = {_format(iter([x])) for name, x in last.items() if workload.trains(name) and x.any()}
    return found | ({"masters": "+".join(sorted(trained))} if trained else {})


def _format(values: Iterator[NDArray[np.floating]]) -> str:
    """Return the narrowest format that represents every value; "float32" means any that is no narrower."""
    first = next(values, None)
    kinds = [] if first is None else low_precisions(itertools.chain([first], values))
    return kinds[0] if kinds else "float32"


def _dtypes(held: Holdings) -> dict[str, str]:
    """Return the precisions in which an engine holds its states: "float32", or several joined by +."""
    return {
        name: "+".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.numel() > 1}))
        for name, tensors in (("parameters", held.parameters), ("optimizer_states", held.optimizer_states))
    }


# --- The retrace pass: the instrumented steps once more, without meters and without the truth.


def retrace(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Run the instrumented steps again by `backward` and `update`, without meters and without the truth.

    Reports `losses` of all steps up to the last mark, `digests` of the first `request.steps`, each read as in the
    instrumented pass, and `timed_digests` at later marks. Each batch is trained on once, as in the timed pass, even if
    loss scaling skips its step.
    """
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
