"""The untouched pass: seconds per optimizer step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.reference.data import Batch, make_batch
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request


def time_steps(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Seconds of every step after `request.warmup` steps, raw."""
    engine = adapter.build(request.case, context)
    batches = [make_batch(request.case.workload, step) for step in range(request.warmup + request.steps)]
    built = time.time()
    rank_progress.begin(rank_progress.Phase.TRAIN, len(batches))
    losses = list(_warm_up(engine, batches[: request.warmup]))
    torch.distributed.barrier()
    clock = _cuda_seconds if context.device.type == "cuda" else _cpu_seconds
    seconds = clock(engine, batches[request.warmup :], losses)
    engine.close()
    flops_per_second = matmul_flops_per_second(getattr(torch, request.case.precision.compute), context.device)
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=[float(loss) for loss in losses],
        step_seconds=seconds,
        matmul_flops_per_second=flops_per_second,
    )


def _warm_up(engine: Engine, batches: list[Batch]) -> Iterator[Tensor]:
    for batch in batches:
        yield engine.step(batch)
        rank_progress.advance()


def _cpu_seconds(engine: Engine, batches: list[Batch], losses: list[Tensor]) -> list[float]:
    """Seconds of each step; its loss is appended, unread, for reading would wait for the device."""
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        losses.append(engine.step(batch))
        seconds.append(time.perf_counter() - start)
        rank_progress.advance()  # off the clock
    return seconds


def _cuda_seconds(engine: Engine, batches: list[Batch], losses: list[Tensor]) -> list[float]:
    """The same by CUDA events between steps: the host may run ahead, as it does in training; progress is what the
    device has done."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    done = 0
    for number, batch in enumerate(batches, start=1):
        losses.append(engine.step(batch))
        marks[number].record()
        while done < number and marks[done + 1].query():  # type: ignore[no-untyped-call]
            done += 1
            rank_progress.advance()
    for mark in marks[done + 1 :]:
        mark.synchronize()
        rank_progress.advance()
    return [start.elapsed_time(stop) / 1000 for start, stop in pairwise(marks)]


def matmul_flops_per_second(dtype: torch.dtype, device: torch.device) -> float:
    """The best rate of a square matrix product out of several, for use as this device's peak. A tenth of a second."""
    n = 8192 if device.type == "cuda" else 384
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    best = float("inf")
    torch.distributed.barrier()
    deadline = time.perf_counter() + 0.1
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
