"""Passes for single conformance clauses: dropout, endurance, failure and overflow."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext, begin_step
from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import Deviations, Drift, global_norm
from meshmark.judge.faults import Diagnosis
from meshmark.judge.replica_diagnosis import diagnose_replicas
from meshmark.judge.tolerance_model import ZERO
from meshmark.judge.trace import Trace, gather_trace, host_copies, host_gradients, host_parameters
from meshmark.judge.truth import assess, exact_gradients, initial_values
from meshmark.models.module import build_model
from meshmark.passes.judging import judge
from meshmark.passes.observe import Observer, digests
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import loss_share
from meshmark.spec.workload import Workload

# --- Dropout: one step again and again, without an update. Shows what dropout does to the loss of each rank.

_TINY = 1e-30
NUM_REFERENCES = 96
"""Number of draws of a single process that the ranks' losses are compared with."""


def repeat_with_dropout(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Repeat one step with dropout and without an update, on rows that all data-parallel ranks share.

    The optimizer must not move. The samples of the report are, on every rank, `losses`: this rank's mean losses. On
    rank 0 they also include:

    - `reference`: losses of a single process.
    - `evaluation` and `exact`: an evaluation amid training, and the exact loss.
    - `along` and `size`: gradients as multiples of the exact ones without dropout, and their squares relative to those
      of the exact ones. Each is the mean over tensors.
    - `spread NAME`: how far a tensor's gradients are from the mean of all steps: the mean over steps of the logarithms
      of squared distances, its standard error, and the number of steps.
    - `reference_along`, `reference_size` and `reference_spread NAME`: the same for the single process.
    """
    case = request.case
    engine = adapter.build(case, context)
    built, batch = time.time(), _same_rows(case.workload, case.layout.dp)
    losses, trace = [], Trace(parameters=[host_parameters(engine, case.workload)])
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        if step == request.steps // 2:  # amid training, which must not notice
            evaluation = torch.tensor(float(engine.evaluate(batch)), device=context.device)
        losses.append(float(engine.backward(batch)) * case.layout.dp)
        trace.gradients.append(host_gradients(engine, case.workload))
        engine.update()
        rank_progress.advance()
    torch.distributed.all_reduce(evaluation)
    trace.parameters.append(host_parameters(engine, case.workload))
    engine.close()
    trace.losses, trace.norms = losses, [None] * len(losses)
    union, drifts, num_replicated = gather_trace(trace)
    samples = {"losses": losses}
    if union:
        samples |= {"evaluation": [float(evaluation)]}
        samples |= judge(request, _compare_with_dropout, context, union.gradients, batch).found
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=losses,
        samples=samples,
        drifts=drifts,
        num_replicated=num_replicated,
    )


def _compare_with_dropout(request: Request, own: list[Tensors], batch: Batch) -> dict[str, list[float]]:
    """Return the samples of `repeat_with_dropout` that need the truth. `own` is the gradients of each step."""
    case = request.case
    exact = exact_gradients(case.workload, initial_values(case.workload), batch, case.layout)
    reference, gradients = _references(case.workload, batch.shard(0, case.layout.dp), case.layout.dp)
    return {
        "reference": reference,
        "exact": [exact.loss],
        **_summaries("", own, exact.gradients),
        **_summaries("reference_", gradients, exact.gradients),
    }


def _same_rows(workload: Workload, dp: int) -> Batch:
    """Return a global batch that contains the rows of the first data-parallel rank `dp` times."""
    batch = make_batch(workload, 0).shard(0, dp)
    again = batch.take(torch.arange(len(batch)).repeat(dp))
    return dataclasses.replace(again, total_weight=float(again.weights.sum()))


def _references(workload: Workload, rows: Batch, dp: int) -> tuple[list[float], list[Tensors]]:
    """Return losses and gradients of plain PyTorch with dropout on the same rows.

    Each of the gradients is summed over as many draws as there are data-parallel ranks.
    """
    model = build_model(workload.model)
    model.initialize(workload.seed)
    torch.manual_seed(workload.seed + 1)
    losses, gradients = [], []
    rank_progress.begin(rank_progress.Phase.TRUTH, NUM_REFERENCES // dp * dp)
    for draw in range(1, NUM_REFERENCES // dp * dp + 1):
        loss = loss_share(model(rows.inputs), rows, workload.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()) * dp)
        if draw % dp == 0:
            gradients.append(host_copies({name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
            model.zero_grad()
        rank_progress.advance()
    return losses, gradients


def _summaries(prefix: str, steps: list[Tensors], exact: Tensors) -> dict[str, list[float]]:
    """Return `along` and `size` of every step's gradients, without tensors that are zero by mathematics."""
    norm = global_norm(exact)
    squares = {name: float(np.sum(x * x)) for name, x in exact.items()}
    counted = [name for name, square in squares.items() if math.sqrt(square) > ZERO * norm]

    def mean(numbers: list[float]) -> float:
        return sum(numbers) / max(len(numbers), 1)

    return {
        f"{prefix}along": [
            mean([float(np.sum(g[n] * exact[n])) / squares[n] for n in counted if n in g]) for g in steps
        ],
        f"{prefix}size": [mean([float(np.sum(g[n] * g[n])) / squares[n] for n in counted if n in g]) for g in steps],
        **{f"{prefix}spread {name}": _spread([g[name] for g in steps if name in g]) for name in counted},
    }


def _spread(draws: list[NDArray[Any]]) -> list[float]:
    """Return the mean logarithm of the draws' squared distances from their mean, its standard error, and their number.

    Distances are scaled to have no bias. Their logarithms are nearer to normal than they are.
    """
    if len(draws) < 2:
        return [0.0, 0.0, float(len(draws))]
    middle = np.mean(draws, axis=0, dtype=np.float64)
    squares = [float(np.sum((draw - middle) ** 2)) * len(draws) / (len(draws) - 1) for draw in draws]
    logs = np.log(np.maximum(squares, _TINY))
    return [float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(len(logs)), float(len(logs))]


# --- Endurance: many steps, to see whether memory grows.


def endure(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps, and report the bytes in use after each as `live_bytes`."""
    engine = adapter.build(request.case, context)
    built, live, losses = time.time(), [], []
    gc.freeze()  # the collector need not look again and again at what was there before
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        losses.append(float(engine.step(begin_step(engine, request.case.workload, step))))
        gc.collect()
        live.append(float(live_bytes(context.device)))
        rank_progress.advance()
    engine.close()
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=losses,
        samples={"live_bytes": live},
    )


def live_bytes(device: torch.device) -> int:
    """Return the bytes this process has allocated on `device`: PyTorch's on a GPU, the C library's on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    info = _mallinfo()()
    return int(info.uordblks + info.hblkhd)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@functools.cache
def _mallinfo() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _MallInfo
    return function


# --- Failure: one rank raises an error while the others train on.

MESSAGE = "raised on purpose, to see it end the case"
FAILS_AT = 1


def fail(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train, and raise `RuntimeError` on the last rank in step `FAILS_AT`."""
    engine = adapter.build(request.case, context)
    built, losses = time.time(), []
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        if step == FAILS_AT and context.rank == context.world_size - 1:
            raise RuntimeError(MESSAGE)
        losses.append(float(engine.step(begin_step(engine, request.case.workload, step))))
        rank_progress.advance()
    return RankReport(rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built, losses=losses)


# --- Overflow (fp16): the gradients of one rank overflow in one step, which every rank must then skip.

OVERFLOWS_BEFORE = 1
"""The overflow comes before this step."""


def overflow(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train `request.steps` steps, and between two of them one whose loss is divided by zero on the last rank.

    `moved` is the number of this rank's parameters that the extra step changed. The other steps must be as if it had
    not happened.
    """
    engine = adapter.build(request.case, context)
    built, observer = time.time(), Observer(engine, request)
    moved = 0
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        if step == OVERFLOWS_BEFORE:
            batch = make_batch(request.case.workload, request.steps)
            last = context.rank == context.world_size - 1
            engine.backward(dataclasses.replace(batch, total_weight=0) if last else batch)
            engine.update()
            before, after = observer.trace.parameters[-1], host_parameters(engine, request.case.workload)
            moved = sum(not np.array_equal(before[name], after[name]) for name in before)
        observer.train(step)
    engine.close()
    trace, drifts, num_replicated = gather_trace(observer.trace)
    deviations, diagnosis = judge(request, _assess_overflow, context, trace, drifts).found if trace else ({}, None)
    return RankReport(
        rank=context.rank,
        build_seconds=built - started,
        run_seconds=time.time() - built,
        losses=observer.trace.losses,
        norms=observer.trace.norms,
        deviations=deviations,
        diagnosis=diagnosis,
        drifts=drifts,
        num_replicated=num_replicated,
        left_out=observer.left_out,
        samples={"moved": [float(moved)]},
        digests=digests([trace]) if trace else [],
    )


def _assess_overflow(request: Request, trace: Trace, drifts: Sequence[Drift]) -> tuple[Deviations, Diagnosis | None]:
    """Compare the steps beside the overflowing one with the truth, and diagnose them if they are wrong."""
    case, tolerance_model = request.case, request.tolerance_model
    deviations = assess(trace, case.workload, layout=case.layout)
    diagnosis = diagnose_replicas(case, [trace], deviations, drifts, tolerance_model) if tolerance_model else None
    return deviations, diagnosis
