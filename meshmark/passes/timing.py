"""Run the untouched pass: seconds per optimizer step, as an external stopwatch would measure them.

After warm-up the ranks run laps that they start together (`meshmark.measure.laps`). Only `Engine.step` is timed.
Batches are made before a lap. After a lap the losses are read, times are exchanged, and every rank decides from the
same times whether to add another lap.

The timed steps are shown to be those that were judged. For this, the losses of all steps are compared, and the bits of
the parameters near the end of warm-up, which the instrumented pass also reached, and after the last step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.judge.deviation import replicas_of_ranks
from meshmark.judge.trace import Trace, all_gather_json, gather_replicas, host_parameters
from meshmark.measure.laps import Lap, num_steps_to_add
from meshmark.measure.profiler import profile_steps
from meshmark.measure.readings import read_device_memory, start_device_memory
from meshmark.passes.observe import compile_seconds, digests, expect_tuned
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request
from meshmark.reference.data import Batch, make_batch

Clock = Callable[[Engine, list[Batch], list[Tensor]], list[float]]
"""Clock that trains on batches and appends their losses, unread. It returns the monotonic time at the start and after
each step.
"""


def time_steps(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Time `request.steps` steps after `request.warmup`, and as many more as `num_steps_to_add` asks for."""
    engine = adapter.build(request.case, context)
    built = time.time()
    stopwatch = Stopwatch(engine, request, _cuda_clock if context.device.type == "cuda" else _cpu_clock)
    trace, when = Trace(), [max(request.warmup - 1, 0)]
    stopwatch.warm_up(when[0])
    if request.assess:
        trace.parameters.append(host_parameters(engine, request.case.workload))
    stopwatch.warm_up(request.warmup - when[0])  # what the look has disturbed is settled again
    start_device_memory(context.device)
    first = time.monotonic()
    stopwatch.run()
    span = first, time.monotonic()
    device_memory = read_device_memory(context.device)
    when.append(len(stopwatch.losses))
    if request.assess:
        trace.parameters.append(host_parameters(engine, request.case.workload))
    tuned = expect_tuned(engine, request.case, context.device, len(stopwatch.losses))
    engine.close()
    traces, drifts, _ = gather_replicas(trace, replicas_of_ranks(request.case))
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=stopwatch.losses,
        kernels=tuned,
        compile_seconds=compile_seconds(request.case),
        step_seconds=stopwatch.step_seconds,
        lap_starts=stopwatch.lap_starts,
        lap_steps=stopwatch.lap_steps,
        cpu_seconds=stopwatch.cpu_seconds if context.device.type == "cpu" else [],
        drifts=drifts,
        device_memory=device_memory,
        timed_span=span,
        timed_digests=dict(zip(when, digests(traces), strict=True)) if traces and request.assess else {},
    )


class Stopwatch:
    """Clock of one rank. The ranks exchange their times after every lap."""

    def __init__(self, engine: Engine, request: Request, clock: Clock) -> None:
        self.engine, self.request, self.clock = engine, request, clock
        self.losses: list[float] = []
        """Losses of all steps, including warm-up."""
        self.step_seconds: list[float] = []
        """Seconds of this rank's steps."""
        self.lap_starts: list[float] = []
        """Seconds by which this rank starts each lap after the first rank of its node."""
        self.lap_steps: list[int] = []
        self.cpu_seconds: list[float] = []
        """CPU seconds by lap, of all threads of this process, in user and kernel mode."""

    def warm_up(self, num_steps: int) -> None:
        rank_progress.begin(rank_progress.Phase.TRAIN, num_steps)
        for batch in self._batches(num_steps):
            self.losses.append(float(self.engine.step(batch)))
            rank_progress.advance()

    def run(self) -> None:
        """Run laps until there is no step to add."""
        all_seconds, num_steps = list[float](), self.request.steps
        while num_steps:
            all_seconds += self._lap(num_steps).step_seconds
            num_steps = num_steps_to_add(all_seconds, self.request.timing_budget_seconds)

    def _lap(self, num_steps: int) -> Lap:
        batches, losses = self._batches(num_steps), list[Tensor]()
        rank_progress.begin(rank_progress.Phase.TRAIN, num_steps)
        cpu_before = time.process_time()
        marks = self.clock(self.engine, batches, losses)
        self.cpu_seconds.append(round(time.process_time() - cpu_before, 7))
        self.losses += [float(loss) for loss in losses]
        everyone: list[tuple[str, list[float]]] = all_gather_json([_node(), marks])
        first = {node: min(its[0] for where, its in everyone if where == node) for node, _ in everyone}
        self.step_seconds += [round(end - start, 7) for start, end in itertools.pairwise(marks)]
        self.lap_starts.append(round(marks[0] - first[_node()], 7))
        self.lap_steps.append(num_steps)
        return Lap(rank_ends=[[mark - first[node] for mark in its[1:]] for node, its in everyone])

    def _batches(self, num_steps: int) -> list[Batch]:
        done = len(self.losses)
        made = [make_batch(self.request.case.workload, step) for step in range(done, done + num_steps)]
        return [batch.pinned() for batch in made] if self.request.device == "cuda" else made


def _node() -> str:
    """Return an id of the running kernel. Ranks with the same id share its monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _cpu_clock(engine: Engine, batches: list[Batch], losses: list[Tensor]) -> list[float]:
    dist.barrier()
    marks = [time.monotonic()]
    for batch in batches:
        losses.append(engine.step(batch))
        marks.append(time.monotonic())
        rank_progress.advance()  # a microsecond
    return marks


def _cuda_clock(engine: Engine, batches: list[Batch], losses: list[Tensor]) -> list[float]:
    """Time steps with CUDA events.

    The host may run ahead, as it does in training. Progress counts what the device has finished. The lap ends when all
    streams are idle.
    """
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()  # NCCL's barrier is a kernel, which the host may not have waited for
    start = time.monotonic()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    done = 0
    for number, batch in enumerate(batches, start=1):
        losses.append(engine.step(batch))
        events[number].record()
        while done < number and events[done + 1].query():  # type: ignore[no-untyped-call]
            done += 1
            rank_progress.advance()
    for event in events[done + 1 :]:
        event.synchronize()
        rank_progress.advance()
    torch.cuda.synchronize()
    end = time.monotonic()
    within = [start + events[0].elapsed_time(event) / 1000 for event in events[1:-1]]
    return [start, *(min(mark, end) for mark in within), end]


# --- The profiled pass: steps after warm-up, each waited for to its end. They are slower than untouched ones.


def profile(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Run `request.steps` steps under the profiler. The first rank writes its trace to `request.traces`."""
    engine = adapter.build(request.case, context)
    built, workload, losses = time.time(), request.case.workload, list[float]()
    rank_progress.begin(rank_progress.Phase.TRAIN, request.warmup + request.steps)
    batches = [make_batch(workload, step) for step in range(request.warmup + request.steps)]
    for batch in batches[: request.warmup]:
        losses.append(float(engine.step(batch)))
        rank_progress.advance()

    def step(number: int) -> None:
        losses.append(float(engine.step(batches[number])))
        rank_progress.advance()

    trace = Path(request.traces) if request.traces and context.rank == 0 else None
    found = profile_steps(step, range(request.warmup, len(batches)), context.device, trace)
    engine.close()
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=losses,
        profile=found,
    )


# --- The peak pass: what this machine computes at best, in one process, while nothing else of the session runs.

NUM_PRODUCTS = 10
WARM_UP_SECONDS = 0.3
NUM_WARM_UP = 3
"""Least number of products before timing."""
_SIZE = {"cpu": 768, "cuda": 8192}
"""Size of the square matrices: large enough to be limited by the processor, small enough for bf16 on a CPU."""


def measure_peak(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Measure the operations per second of matrix products in the case's precision, on `request.num_threads` cores or
    on one GPU.

    The result is the median of `NUM_PRODUCTS` products. The best of many would reflect clock jitter or a momentary
    boost.
    """
    if context.device.type == "cpu":
        torch.set_num_threads(request.num_threads)
    n = _SIZE[context.device.type]
    a, b = torch.randn(2, n, n, device=context.device).to(getattr(torch, request.case.precision.compute))
    rank_progress.begin(rank_progress.Phase.TRAIN)
    warm_at, done = time.monotonic() + WARM_UP_SECONDS, 0
    while done < NUM_WARM_UP or time.monotonic() < warm_at:  # the first call of a GPU's library may take seconds
        _seconds(a, b)
        done += 1
        rank_progress.advance()
    peak = 2 * n**3 / statistics.median(_seconds(a, b) for _ in range(NUM_PRODUCTS))
    return RankReport(rank=context.rank, build_seconds=0.0, run_seconds=time.time() - started, flops_per_second=peak)


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the seconds of one product."""
    start = time.monotonic()
    torch.mm(a, b)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.monotonic() - start
