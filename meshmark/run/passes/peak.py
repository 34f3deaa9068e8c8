"""What this machine can compute at best, in one process, while nothing else of the session runs."""

from __future__ import annotations

import statistics
import time

import torch

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request

NUM_PRODUCTS = 10
WARM_UP_SECONDS = 0.3
NUM_WARM_UP = 3
"""At least."""
_SIZE = {"cpu": 768, "cuda": 8192}
"""Of square matrices: large enough for the rate to be the processor's, small enough for bf16 on a CPU."""


def measure_peak(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Operations a second of a matrix product in the case's precision on `request.num_threads` cores, or on one GPU:
    the median of NUM_PRODUCTS. A best of many would be what the clock's jitter or a boost of a moment makes."""
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
    """Of one product."""
    start = time.monotonic()
    torch.mm(a, b)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.monotonic() - start
