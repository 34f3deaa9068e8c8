"""What one rank does, however its process came to be: join the others, build the engine, run the pass."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from meshmark import rank_progress
from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.clip import clip, text_of, told
from meshmark.environment import DEFAULT_THREADS
from meshmark.errors import ClusterError
from meshmark.measure.fake_world import Copies, fake_world
from meshmark.run import kernels
from meshmark.run.disk import means_no_space
from meshmark.run.hang_evidence import answer_when_asked
from meshmark.run.kernels import pinned
from meshmark.run.passes.dropout import repeat_with_dropout
from meshmark.run.passes.endure import endure
from meshmark.run.passes.fail import fail
from meshmark.run.passes.links import measure_links
from meshmark.run.passes.measure_noise import measure_noise
from meshmark.run.passes.observe import observe, observe_alone
from meshmark.run.passes.overflow import overflow
from meshmark.run.passes.peak import measure_peak
from meshmark.run.passes.profile import profile
from meshmark.run.passes.resume import lose_a_rank, resume, save_halfway
from meshmark.run.passes.retrace import retrace
from meshmark.run.passes.timing import time_steps
from meshmark.run.rank_info import RankInfo
from meshmark.run.rank_report import RankFailure, RankReport
from meshmark.run.record import Status
from meshmark.run.request import Request, Task
from meshmark.run.store import RunStore, run_secret

_TASKS = {
    Task.OBSERVE: observe,
    Task.TIME: time_steps,
    Task.PROFILE: profile,
    Task.PEAK: measure_peak,
    Task.LINKS: measure_links,
    Task.RETRACE: retrace,
    Task.NOISE: measure_noise,
    Task.SAVE: save_halfway,
    Task.LOSE: lose_a_rank,
    Task.RESUME: resume,
    Task.ENDURE: endure,
    Task.DROPOUT: repeat_with_dropout,
    Task.OVERFLOW: overflow,
    Task.FAIL: fail,
}


def perform(request: Request, info: RankInfo) -> RankReport | RankFailure:
    """Do `request` as the rank that `info` says, in a process that has no process group yet. After a failure the
    process is to end without a clean-up, for the communication layer's would wait for peers that are gone."""
    started = time.time()
    try:
        timeout = datetime.timedelta(seconds=request.time_limit_seconds + 60)  # the launcher's limit comes first
        store = _store(info, timeout)  # held here: PyTorch keeps no Python store alive
        if request.task is Task.FAKE_WORLD:
            return _perform_alone(request, info, started)
        context = _join(request, info, store, timeout)
        if request.backend == "nccl":  # gloo's recorder cannot be read while a collective waits
            answer_when_asked(info)
        rank_progress.begin(rank_progress.Phase.BUILD)
        with pinned(request.case.tuning):
            report = _TASKS[request.task](request, load_adapter(request.adapter)(), context, started)
            report = dataclasses.replace(report, kernels=kernels.told() | report.kernels)
        torch.distributed.destroy_process_group()
    except BaseException as error:  # whatever it was, it is this rank's outcome
        return RankFailure(
            rank=info.rank,
            kind=_kind(
                error, [info.folder, *([Path(request.checkpoint)] if request.checkpoint else []), _SHARED_MEMORY]
            ),
            message=told(error),
            time=time.time(),
            traceback=clip(traceback.format_exc()),
        )
    return report


def _perform_alone(request: Request, info: RankInfo, started: float) -> RankReport:
    """Do `request` as the first of its `fake_ranks`, whatever rank of its launch this process is."""
    rank, world_size = request.fake_ranks[0], request.case.world_size
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    device = _prepare(request, info, rank)
    copies = Copies.NCCL if request.backend == "nccl" else Copies.GLOO
    with fake_world(rank, world_size, copies), pinned(request.case.tuning):
        context = RankContext(
            rank=rank, world_size=world_size, device=device, backend=request.backend, scratch=info.folder
        )
        rank_progress.begin(rank_progress.Phase.BUILD)
        report = observe_alone(request, load_adapter(request.adapter)(), context, started)
        return dataclasses.replace(report, kernels=kernels.told() | report.kernels)


def _store(info: RankInfo, timeout: datetime.timedelta) -> Store:
    """Where the ranks of this launch meet: a file that this user alone can open, or the store of the nodes."""
    if not info.port:
        return FileStore(str(info.folder / "store"), info.world_size)
    return RunStore(info.host, info.port, run_secret(), timeout)


def _prepare(request: Request, info: RankInfo, rank: int) -> torch.device:
    """Set threads, seed and GPU of this process, which is `rank` of its world; return its device."""
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", DEFAULT_THREADS)))
    torch.manual_seed(request.case.workload.seed + rank)
    if request.device != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _join(request: Request, info: RankInfo, store: Store, timeout: datetime.timedelta) -> RankContext:
    """Bring up the default process group over `store`."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(_recorded(request))
    if request.task is Task.PROFILE:
        os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"  # it takes events around every collective
    device = _prepare(request, info, info.rank)
    torch.distributed.init_process_group(
        request.backend,
        store=PrefixStore(info.prefix, store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
    )
    return RankContext(
        rank=info.rank, world_size=info.world_size, device=device, backend=request.backend, scratch=info.folder
    )


def _recorded(request: Request) -> int:
    """Entries of the flight recorder: all of a metered pass's or profiled step's, on any backend. Elsewhere it would
    only take time, and memory with every collective; but NCCL's is cheap, and all the evidence that there is of a hang.
    """
    if request.task is Task.PROFILE:
        return 20_000
    if request.task is Task.OBSERVE and request.metered:
        return max(20_000, 4_000 * request.steps)
    return 2_000 if request.backend == "nccl" else 0


_SHARED_MEMORY = Path("/dev/shm")


def _kind(error: BaseException, folders: Iterable[Path] = ()) -> Status:
    """`folders`: those that the rank writes to."""
    if means_no_space(error, folders):
        return Status.NO_SPACE
    if isinstance(error, ClusterError):  # nodes and their store are Meshmark's
        return Status.UNFINISHED
    return Status.OOM if _is_out_of_memory(error) else Status.RAISED


_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory"
    r"|CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED"
    r"|NCCL.*(Cuda failure \d*\s*'out of memory'|out of memory)|Failed to CUDA (c|m)alloc",
    re.DOTALL,
)
"""What libraries that do not go through PyTorch's allocator say of a GPU, or a host, that is full."""


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_OUT_OF_MEMORY.search(text_of(error)))
