"""Run the instrumented pass: what a rank computes and, if it is metered, what it holds and sends.

A case's tuning is checked by one more step under PyTorch's profiler, of which nothing else is read. Tuning that is
asked for and not in use fails the rank. It never becomes a slower run that is reported as tuned.

`localise` trains a failed case again, and finds the module in which it begins to deviate.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter, Arithmetic
from meshmark.adapter.engine import DataParallelEngine, Engine, Holdings, RankContext, TrafficSource, begin_step
from meshmark.algorithms.contract import Tensors
from meshmark.errors import AdapterError, TrafficError
from meshmark.judge.beginning import Beginning, Recorder, first_deviation
from meshmark.judge.deviation import Deviations, Drift, replica_of, replicas_of_ranks
from meshmark.judge.diagnosis import UNKNOWN, diagnose_sample
from meshmark.judge.faults import Diagnosis, Fault
from meshmark.judge.hidden_faults import hidden_fault
from meshmark.judge.layered import all_cores, assess_pieces
from meshmark.judge.pristine import pristine
from meshmark.judge.replica_diagnosis import diagnose_replicas
from meshmark.judge.trace import (
    DiskNotebook,
    Trace,
    all_gather_json,
    gather_replicas,
    host_copies,
    host_gradients,
    host_parameters,
    local_holdings,
    low_precisions,
    moved,
    tensor_digests,
)
from meshmark.judge.truth import assess_replicas
from meshmark.judge.twin import rounded_gradients, twin_of
from meshmark.measure.allocations import ExtraPeak
from meshmark.measure.meters import Named, TorchTraffic, Watch, alike_steps, read_memory, read_traffic
from meshmark.measure.readings import MemoryReading, StepReadings, TrafficReading
from meshmark.passes.judging import Judged, judge
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request, Task
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import ChunkedCrossEntropy
from meshmark.spec.case import Attention, Case, Matmul
from meshmark.spec.precision import LossScaling
from meshmark.spec.workload import Workload
from meshmark.text import describe_error, pluralize
from meshmark.theory.traffic import METERED_STEP

# --- Train a failed case again, and find the module in which it begins to deviate.


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
            f"modules are compared in fp32 and fp64, because 16 bits round too much; this case is in {case.precision}"
        )
    if not isinstance(engine, DataParallelEngine) or case.layout.tp * case.layout.pp * case.layout.cp > 1:
        raise AdapterError(
            f"{case.adapter}: modules are compared where every rank runs the whole model; this one's do not"
        )
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        batch, before = begin_step(engine, case.workload, step), host_parameters(engine, case.workload)
        with Recorder(engine.inner()) as recorder:
            engine.backward(batch)
        if not recorder.calls:
            raise AdapterError(
                f"{case.adapter}: the model was not called as a whole, so its modules cannot be compared"
            )
        with pristine():
            found = first_deviation(recorder.calls, before, case, rank, step)
        engine.update()
        rank_progress.advance()
        if any(all_gather_json(found is not None)) if dist.is_initialized() else found:
            return found
    return None


# --- Check that a case's tuning is in use.

REGION = "Torch-Compiled Region"
"""Prefix of the name under which PyTorch's profiler shows a compiled graph's forward pass."""
UNFUSED = "unfused optimizer"
ROUNDED = "rounded product"
WIDE = "wide sums"
_FUSED_STEP = "aten::_fused_"
_LOSS = ChunkedCrossEntropy.__name__
_ATTENTION = {
    Attention.FLASH: "aten::_scaled_dot_product_flash_attention",
    Attention.EFFICIENT: "aten::_scaled_dot_product_efficient_attention",
    Attention.CUDNN: "aten::_scaled_dot_product_cudnn_attention",
    Attention.MATH: "aten::_scaled_dot_product_attention_math",
}
"""Prefixes of operator names."""

Seen = Mapping[str, int]
"""How often each item ran on one rank."""


def expect_tuned(engine: Engine, case: Case, device: torch.device, step: int) -> dict[str, str]:
    """Return which parts of the case's tuning ran in `step` on this rank.

    A collective call. Raises `AdapterError` if a part did not run on some rank.
    """
    if not case.tuning:
        return {}
    own = _signs_of_tuning(engine, case, device, step)
    every: list[dict[str, int]] = all_gather_json(own)
    if idle := list(unused(case, every, step)):
        raise AdapterError(
            f"tuning {case.tuning} was asked for, but {'; '.join(idle)}: the adapter is to build by `configure`, "
            "`build_optimizer(..., case.tuning)` and `loss_share`, or to leave it out of `Capabilities.tunings`"
        )
    return {f"tuning {case.tuning}": ", ".join(f"{name} x {count}" for name, count in sorted(own.items()))}


def compile_seconds(case: Case) -> float:
    """Return the seconds that this process has spent compiling."""
    if not case.tuning.compile:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def unused(case: Case, every: Sequence[Seen], step: int) -> Iterator[str]:
    """Yield the parts of the case's tuning that did not run, from the counts of every rank."""
    tuning, layout, count = case.tuning, case.layout, case.layout.num_micro_batches
    blocks = (case.workload.model.num_layers - (case.workload.skipped_at(step) is not None)) // layout.pp
    for rank, seen in enumerate(every):
        if tuning.compile and seen.get(REGION, 0) < blocks * count:
            yield (
                f"rank {rank} ran {seen.get(REGION, 0)} compiled regions for {count} micro-batches of at least "
                f"{blocks} blocks"
            )
        if tuning.fused_optimizer and (UNFUSED in seen or _FUSED_STEP not in seen):
            yield f"rank {rank} stepped an optimizer that is not fused"
        kernels = {kernel for kernel, operator in _ATTENTION.items() if operator in seen}
        if tuning.compile and not kernels:  # in a compiled graph, math is no operator of its own
            kernels = {Attention.MATH}
        if tuning.attention and kernels != {tuning.attention}:
            yield f"rank {rank} ran {', '.join(sorted(kernels)) or 'no'} attention"
        if tuning.matmul is Matmul.TF32 and ROUNDED not in seen:
            yield f"rank {rank} multiplies whole float32 numbers"
        if tuning.matmul is Matmul.WIDE_SUMS and WIDE not in seen:
            yield f"rank {rank} allows split products to be summed in 16 bits"
    if tuning.chunked_loss and max(seen.get(_LOSS, 0) for seen in every) < count:
        yield "no rank computed the loss in chunks"


def _signs_of_tuning(engine: Engine, case: Case, device: torch.device, step: int) -> dict[str, int]:
    """Count, in one profiled step, the kernels and settings by which each tuning option shows."""
    batch = begin_step(engine, case.workload, step)
    with profile(activities=[ProfilerActivity.CPU]) as profiled, _optimizers() as stepped:
        engine.step(batch)
    starts = (REGION, _FUSED_STEP, *_ATTENTION.values())
    found: Counter[str] = Counter()
    for event in profiled.events() or []:
        found[_LOSS] += event.name == _LOSS
        if "backward" not in event.name:
            found.update(start for start in starts if event.name.startswith(start))
    found[UNFUSED] = sum(not group.get("fused") for group in stepped if group["params"])
    found[ROUNDED] = _rounds_products(device)
    found[WIDE] = not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return {name: int(count) for name, count in found.items() if count}


@contextlib.contextmanager
def _optimizers() -> Iterator[list[dict[str, Any]]]:
    """Collect the parameter groups of every optimizer that steps within the context, as they are at that time."""
    groups: list[dict[str, Any]] = []

    def note(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
        groups.extend(optimizer.param_groups)

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield groups
    finally:
        hook.remove()


def _rounds_products(device: torch.device) -> bool:
    """Return whether a float32 operand loses its last bits in a product, as in TF32.

    The product itself is examined rather than the setting.
    """
    odd = torch.full((256, 256), 1 + 2.0**-12, device=device)
    return not torch.equal(odd @ torch.eye(256, device=device), odd)


# --- Train an engine, and note everything that it computes.

MOST_LEFT_OUT = 24
"""Largest number of attempts at one step. Each halves the loss scale; GradScaler starts at 2^16, which is then far
below one.
"""
MOST_GROWTH = 4
"""Largest factor by which dynamic loss scaling may raise its scale from one step to the next. The usual one is 2."""


class Notebook(Protocol):
    """Storage of the tensors that a rank notes."""

    def parameters(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        """Return the parameters before `step`. A collective call."""

    def gradients(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        """Return the gradients of `step`. A collective call."""


class HostNotebook:
    """Notebook that keeps all tensors in this rank's memory."""

    def parameters(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        return host_parameters(engine, workload)

    def gradients(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        return host_gradients(engine, workload)


class Observer:
    """Notes of a run on one rank."""

    def __init__(
        self, engine: Engine, request: Request, *, retries: bool = True, notebook: Notebook | None = None
    ) -> None:
        """Begin the notes.

        `retries`: whether to try a step again that dynamic loss scaling skipped. `notebook`: this rank's memory by
        default.
        """
        self.engine, self.request, self.retries = engine, request, retries
        self.notebook: Notebook = notebook or HostNotebook()
        self.trace = Trace(replica=replica_of(request.case.layout, dist.get_rank()) if dist.is_initialized() else 0)
        self.unheld = ""
        """Error of `holdings()`, if any. Losses, gradients and parameters do not depend on it."""
        self.left_out = 0
        """Number of steps that dynamic loss scaling skipped, and that were tried again."""
        self.scale_fault: Diagnosis | None = None
        """Raised loss scales by more than `MOST_GROWTH` at once, so that gradients overflowed. None if it did not."""
        self._taken_scale = math.inf
        """Loss scale of the last step that was taken."""
        self.sources: Sequence[TrafficSource] = ()
        """Sources of the last step's traffic."""
        if request.assess:
            self.trace.parameters.append(self.notebook.parameters(engine, request.case.workload, 0))
        if request.assess and request.case.workload.couples_rows:
            self.trace.buffers.append([host_copies(engine.buffers())])

    def holdings(self) -> Holdings:
        """Return what the engine holds. If it fails, return empty holdings and note the reason in `unheld`."""
        try:
            return local_holdings(self.engine)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.unheld = self.unheld or f"Engine.holdings raised {describe_error(error)}"
            return Holdings()

    def train(
        self, step: int, watch: Watch | None = None, meter: Callable[[], Sequence[TrafficSource]] = tuple
    ) -> tuple[Named, Named]:
        """Train one step, and return what the engine holds before and after its update.

        `meter` makes the sources that count the step's traffic. A step that dynamic loss scaling skips, as it should
        if a gradient overflows, is tried again: the run is judged by the steps that were taken.
        """
        batch = begin_step(self.engine, self.request.case.workload, step)
        if self.request.evaluate:
            self.trace.evaluations.append(float(self.engine.evaluate(batch)))
        attempt, left_out = self._attempt(batch, step, watch, meter()), 0
        first_scale = attempt.loss_scale
        while left_out < MOST_LEFT_OUT and self._judges(step) and self._is_left_out(attempt):
            left_out += 1
            if not self.retries:
                break
            if watch:
                watch.forget(step)
            attempt = self._attempt(batch, step, watch, meter())
        if left_out and not self.scale_fault and first_scale > MOST_GROWTH * self._taken_scale:
            detail = (
                f"step {step - 1} was taken with a loss scale of {self._taken_scale:g}, and step {step} begins with "
                f"{first_scale:g}: its gradients overflow {pluralize(left_out, 'time')} before it is taken"
            )
            self.scale_fault = Diagnosis(fault=Fault.LOSS_SCALE, step=step, detail=detail)
        self._taken_scale = attempt.loss_scale
        self.left_out += left_out
        self.trace.left_out.append(left_out)
        self._note(attempt, self._judges(step))
        rank_progress.advance()
        return attempt.before, attempt.after

    def _judges(self, step: int) -> bool:
        """Return whether the results of `step` are compared with the truth."""
        return self.request.assess and (self.request.sample is None or step < self.request.sample.steps)

    def _attempt(self, batch: Batch, step: int, watch: Watch | None, sources: Sequence[TrafficSource]) -> _Attempt:
        judges, workload, self.sources = self._judges(step), self.request.case.workload, sources
        with _window(watch, "backward", step, sources):
            loss = self.engine.backward(batch)
        inputs = batch.tensors()
        before = Named.of(self.holdings(), inputs)
        gradients = self.notebook.gradients(self.engine, workload, step) if judges else {}
        loss_scale = self.engine.loss_scale()
        with _window(watch, "update", step, sources):
            norm = self.engine.update()
        if watch:
            watch.settle(step)
        return _Attempt(
            loss=float(loss),
            norm=None if norm is None else float(norm),
            before=before,
            after=Named.of(self.holdings(), inputs),
            gradients=gradients,
            loss_scale=loss_scale,
            parameters=self.notebook.parameters(self.engine, workload, step + 1) if judges else {},
        )

    def _is_left_out(self, attempt: _Attempt) -> bool:
        """Return whether a gradient overflowed on some rank and no parameter moved on any rank.

        A collective call under dynamic loss scaling.
        """
        if self.request.case.precision.loss_scaling is not LossScaling.DYNAMIC:
            return False
        stood = self.trace.parameters[-1]
        overflows = not all(np.isfinite(gradient).all() for gradient in attempt.gradients.values())
        moved = not all(np.array_equal(stood[name], new) for name, new in attempt.parameters.items())
        everyone = all_gather_json([overflows, moved])
        return any(o for o, _ in everyone) and not any(m for _, m in everyone)

    def _note(self, attempt: _Attempt, judges: bool) -> None:
        self.trace.losses.append(attempt.loss)
        self.trace.norms.append(attempt.norm)
        self.trace.loss_scales.append(attempt.loss_scale)
        if judges:
            self.trace.gradients.append(attempt.gradients)
            self.trace.parameters.append(attempt.parameters)
            self.trace.versions.append(self.engine.server_versions())
            for own in self.trace.buffers:
                own.append(host_copies(self.engine.buffers()))


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """The results of one attempt at a step."""

    loss: float
    norm: float | None
    before: Named
    """Parameters of the engine before the update."""
    after: Named
    gradients: Tensors
    """Gradients. Empty if nothing is assessed, like `parameters`."""
    loss_scale: float
    parameters: Tensors


@contextlib.contextmanager
def _window(watch: Watch | None, name: str, step: int, sources: Sequence[TrafficSource]) -> Iterator[None]:
    for source in sources:
        source.start()
    try:
        with watch.window(name, step) if watch else contextlib.nullcontext():
            yield
    finally:
        for source in sources:
            source.stop()


def digests(traces: Sequence[Trace]) -> list[str]:
    """Return hashes of the bits of all parameters of all replicas, before the first step and after each."""
    replicas = [tensor_digests(trace.parameters) for trace in traces]
    return [
        hashlib.blake2b("".join(repr(sorted(step.items())) for step in steps).encode(), digest_size=8).hexdigest()
        for steps in zip(*replicas, strict=True)
    ]


# --- Run the instrumented pass: what a rank computes and, if it is metered, what it holds and sends.

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
    judged = Judged(found=Assessment(), replaced=[])
    if traces and request.assess:
        judged = judge(request, _assess, context, traces, drifts, adapter.arithmetic, context.device)
    assessment = judged.found
    return RankReport(
        rank=context.rank,
        build_seconds=seen.built - started,
        run_seconds=time.time() - seen.built,
        losses=seen.trace.losses,
        norms=seen.trace.norms,
        deviations=assessment.deviations,
        rounded=assessment.rounded,
        replaced=judged.replaced,
        misled=judged.misled,
        moved=moved(traces) if request.assess else [],
        drifts=drifts,
        diagnosis=assessment.diagnosis or seen.scale_fault,
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
        explain_seconds=assessment.explain_seconds,
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
    scale_fault: Diagnosis | None
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
        scale_fault=observer.scale_fault,
        tuned=tuned,
        unmeasured={
            suite: why for suite, why in (("memory", observer.unheld), ("communication", missing_failures)) if why
        },
    )


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What rank 0 finds of the steps of all ranks."""

    deviations: Deviations = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)
    """See `RankReport.rounded`."""
    diagnosis: Diagnosis | None = None
    explain_seconds: float = 0.0
    """Seconds of the search for the cause of a wrong run."""


def _assess(
    request: Request,
    traces: Sequence[Trace],
    drifts: Sequence[Drift],
    arithmetic: Arithmetic | None,
    device: torch.device,
) -> Assessment:
    """Compare a run with the truth, and diagnose it if it is wrong.

    A sample is compared on the run's device and on all cores, which the other ranks no longer need.
    """
    case, tolerance_model = request.case, request.tolerance_model
    if request.sample:
        with all_cores():
            deviations = assess_pieces(traces[0], case.workload, device=device)
        diagnosis = diagnose_sample(deviations, drifts, tolerance_model) if tolerance_model else None
        return Assessment(deviations=deviations, diagnosis=diagnosis)
    twin = twin_of(case, arithmetic, device)
    compared = assess_replicas(traces, case.workload, layout=case.layout, twin=twin)
    diagnosis, assessed = None, time.monotonic()
    if tolerance_model and (drifts or not tolerance_model.accepts(compared)):
        diagnosis = diagnose_replicas(case, traces, compared, drifts, tolerance_model, twin)
        if diagnosis and diagnosis.fault in UNKNOWN and twin and case.precision.is_mixed and len(traces) == 1:
            found = hidden_fault(traces[0], compared, tolerance_model, twin)
            diagnosis = replace(found, step=diagnosis.step) if found else diagnosis
    elif tolerance_model and twin and len(traces) == 1:
        diagnosis = hidden_fault(traces[0], compared, tolerance_model, twin)
    return Assessment(
        deviations=compared,
        rounded=rounded_gradients(traces[0], twin) if twin and len(traces) == 1 else [],
        diagnosis=diagnosis,
        explain_seconds=time.monotonic() - assessed,
    )


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
        losses.append(float(engine.backward(begin_step(engine, request.case.workload, step))))
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
