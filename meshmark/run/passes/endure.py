"""Many steps: does memory grow?"""

from __future__ import annotations

import ctypes
import functools
import gc
import time

import torch

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.reference.data import make_batch
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request


def endure(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Bytes in use after every one of `request.steps` steps, as `live_bytes`."""
    engine = adapter.build(request.case, context)
    built, live, losses = time.time(), [], []
    gc.freeze()  # the collector need not look again and again at what was there before
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        losses.append(float(engine.step(make_batch(request.case.workload, step))))
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
    """Bytes that this process has allocated on `device`: PyTorch's on a GPU, all of the C library's on a CPU."""
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
