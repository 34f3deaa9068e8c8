"""Process of one rank, from a request to a report.

Under torchrun the entry point is `torchrun ... -m meshmark.launch.rank REQUEST.json`. Forked ranks call `run_rank`.

`RankInfo` says where a rank stands in a launch. A rank that hangs leaves its stacks and collectives as evidence.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from meshmark import rank_progress
from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.environment import DEFAULT_THREADS, threads_of_ranks, versions
from meshmark.errors import ClockError, ClusterError, JudgingError
from meshmark.launch.folders import means_no_space
from meshmark.launch.processes import (
    NO_PROCESS,
    NO_PROCESS_ADVICE,
    die_with_parent,
    forget_exit_functions,
    is_process_limit_reached,
    leave,
)
from meshmark.launch.store import RunStore, run_secret
from meshmark.measure.fake_world import Copies, fake_world
from meshmark.measure.flight_recorder import dump, under_way
from meshmark.passes.clauses import endure, fail, overflow, repeat_with_dropout
from meshmark.passes.kernels import effective_settings, pinned
from meshmark.passes.links import measure_links
from meshmark.passes.noise import measure_noise
from meshmark.passes.observe import localise, observe, observe_alone, retrace
from meshmark.passes.resume import lose_a_rank, resume, save_halfway
from meshmark.passes.timing import measure_peak, profile, time_steps
from meshmark.records.rank_report import RankFailure, RankReport
from meshmark.records.record import Status
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode
from meshmark.text import clip, describe_error, text_of

# --- Position of a rank in a launch.


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Position of a rank in a launch, and the files of the launch."""

    rank: int
    local_rank: int
    local_world_size: int
    """Ranks of this launch on this node."""
    world_size: int
    host: str
    port: int
    """Port of the run's store. 0 if all ranks are on this node; the store is then a file in `folder`."""
    prefix: str
    """Keys of this launch in the store start with it."""
    folder: Path
    """Folder of this launch on this node, for reports, failures, logs and stacks."""

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.rank}"


# --- What a rank that hangs was communicating. The launcher asks for it before it ends the rank.


def answer_about_collectives(info: RankInfo) -> None:
    """Write what this rank communicates whenever the launcher asks. The flight recorder must be on."""
    pipe = info.file("ask")
    os.mkfifo(pipe, 0o600)
    threading.Thread(target=_answer, args=(pipe, info.file("collectives")), daemon=True).start()


def _answer(pipe: Path, file: Path) -> None:
    with pipe.open():  # until the launcher opens it too
        pass
    try:
        text = "\n".join(under_way(dump()["entries"])) or "nothing was communicated"
    except Exception as error:
        text = f"the flight recorder cannot be read: {describe_error(error)}"
    file.write_text(text + "\n")


def ask(info: RankInfo) -> bool:
    """Return whether the rank listens. Its answer is written to its file `collectives`."""
    try:
        os.close(os.open(info.file("ask"), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # no pipe, or nobody at its other end
        return False
    return True


# --- Performing a request: join the other ranks, build the engine, run the pass.

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
    Task.LOCALISE: localise,
    Task.FAIL: fail,
}


def perform(request: Request, info: RankInfo) -> RankReport | RankFailure:
    """Run `request` as the rank `info`, in a process that has no process group yet.

    After a failure the process must end without cleanup, because the communication layer's cleanup would wait for peers
    that are gone.
    """
    started = time.time()
    try:
        timeout = datetime.timedelta(seconds=request.time_limit_seconds + 60)  # the launcher's limit comes first
        store = _store(info, timeout)  # held here: PyTorch keeps no Python store alive
        if request.task is Task.FAKE_WORLD:
            return _perform_alone(request, info, started)
        context = _join(request, info, store, timeout)
        if request.backend == "nccl":  # gloo's recorder cannot be read while a collective waits
            answer_about_collectives(info)
        rank_progress.begin(rank_progress.Phase.BUILD)
        with pinned(request.case.tuning):
            adapter = load_adapter(request.adapter)()  # once: it may leave the folder that its file is named from
            report = _TASKS[request.task](request, adapter, context, started)
            report = dataclasses.replace(report, kernels=effective_settings() | report.kernels)
            if name := adapter.virtual_environment:
                report = dataclasses.replace(report, versions={"virtual environment": name, **versions()})
        torch.distributed.destroy_process_group()
    except BaseException as error:  # whatever it was, it is this rank's outcome
        return RankFailure(
            rank=info.rank,
            kind=_kind(
                error, [info.folder, *([Path(request.checkpoint)] if request.checkpoint else []), _SHARED_MEMORY]
            ),
            message=describe_error(error) + (NO_PROCESS_ADVICE if _lacks_process(error) else ""),
            time=time.time(),
            traceback=clip(traceback.format_exc()),
        )
    return report


def _perform_alone(request: Request, info: RankInfo, started: float) -> RankReport:
    """Run `request` as the first of its `fake_ranks`, regardless of this process's rank in the launch."""
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
        return dataclasses.replace(report, kernels=effective_settings() | report.kernels)


def _store(info: RankInfo, timeout: datetime.timedelta) -> Store:
    """Return the store of this launch's process group: a file that only this user can open, or the nodes' store."""
    if not info.port:
        return FileStore(str(info.folder / "store"), info.world_size)
    return RunStore(info.host, info.port, run_secret(), timeout)


def _prepare(request: Request, info: RankInfo, rank: int) -> torch.device:
    """Set threads, seed and GPU of this process, which is `rank` of its world; return its device."""
    os.environ.setdefault("OMP_NUM_THREADS", DEFAULT_THREADS)
    torch.set_num_threads(threads_of_ranks(os.environ))
    torch.manual_seed(request.case.workload.seed + rank)
    if request.device != "cuda":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(info.local_rank % gpus)
    if info.local_world_size > gpus and request.backend == "nccl":
        # NCCL refuses two ranks of one GPU on one host, so each round of ranks over the GPUs is a host of its own.
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        os.environ["NCCL_HOSTID"] = f"{host}-{info.local_rank // gpus}"
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
    """Return the number of entries that the flight recorder keeps: all those of a metered or profiled pass.

    In other passes it would take time, and memory with every collective. NCCL's recorder is cheap, and gives the only
    evidence of a hang, so it stays on.
    """
    if request.task is Task.PROFILE:
        return 20_000
    if request.task is Task.OBSERVE and request.metered:
        return max(20_000, 4_000 * request.steps)
    return 2_000 if request.backend == "nccl" else 0


_SHARED_MEMORY = Path("/dev/shm")


def _kind(error: BaseException, folders: Iterable[Path] = ()) -> Status:
    """Return the status of a pass that failed with `error`. `folders` are those that the rank writes to."""
    if means_no_space(error, folders):
        return Status.NO_SPACE
    if isinstance(error, ClusterError | ClockError | JudgingError):  # nodes, clock and judge are not the adapter's
        return Status.UNFINISHED
    if _lacks_process(error):
        return Status.UNFINISHED
    return Status.OOM if _is_out_of_memory(error) else Status.RAISED


_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory"
    r"|CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED"
    r"|NCCL.*(Cuda failure \d*\s*'out of memory'|out of memory)|Failed to CUDA (c|m)alloc",
    re.DOTALL,
)
"""Messages about a full GPU or host from libraries that do not use PyTorch's allocator."""


def _lacks_process(error: BaseException) -> bool:
    return bool(NO_PROCESS.search(text_of(error))) and is_process_limit_reached()


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_OUT_OF_MEMORY.search(text_of(error)))


# --- The process of a rank: how it comes to be, and what it leaves for the launcher.

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write every thread's Python stack, even while it hangs inside C."""


def run_forked_rank(request: Request, info: RankInfo) -> NoReturn:
    """Run a forked rank in a new session, so that the processes it starts end with it."""
    os.setsid()
    forget_exit_functions()
    os.environ.update(
        RANK=str(info.rank),
        LOCAL_RANK=str(info.local_rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        MASTER_ADDR=info.host,
        MASTER_PORT=str(info.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    run_rank(request, info)


def run_rank(request: Request, info: RankInfo) -> NoReturn:
    """Do `request` and leave a report, or leave a failure and exit with 1."""
    _leave_traces(info)
    outcome = perform(request, info)
    try:
        _write(info.file("failure" if isinstance(outcome, RankFailure) else "report"), json.dumps(encode(outcome)))
    except OSError as error:  # no fault of what was measured; a failure is short, and may still find room
        told = f"what it measured cannot be written: {describe_error(error)}"
        kind = _kind(error, [info.folder])
        outcome = RankFailure(rank=info.rank, kind=kind, message=told, time=time.time(), traceback="")
        _write(info.file("failure"), json.dumps(encode(outcome)))
    if isinstance(outcome, RankFailure):
        print(outcome.traceback, file=sys.stderr, end="")
    sys.stdout.flush()
    sys.stderr.flush()
    leave(int(isinstance(outcome, RankFailure)))


def _leave_traces(info: RankInfo) -> None:
    """Redirect log, progress, stacks and temporary files to the launch's folder.

    Standard input becomes empty, and Ctrl-C is left to the launcher.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(info.file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ["TMPDIR"], tempfile.tempdir = str(info.folder), None  # goes with the launch, and is open to nobody else
    rank_progress.watch(info.file("progress"))
    faulthandler.register(STACK_SIGNAL, file=open(info.file("stack"), "w"), all_threads=True)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)  # a crash inside C leaves its stack in the log


def _write(path: Path, text: str) -> None:
    """Write a file atomically, so that the launcher reads a whole file or none."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


# --- The entry under torchrun.


def main(file: Path) -> NoReturn:
    """Run one rank under torchrun. Ranks meet in a file in a folder that only this user can open, and need no port."""
    die_with_parent(os.getppid())
    rank, local_rank, world_size, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    info = RankInfo(
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        world_size=world_size,
        host="127.0.0.1",
        port=0,
        prefix="torchrun",
        folder=file.parent,
    )
    info.file("pid").write_text(str(os.getpid()))
    mark = open(info.file("asked_to_end"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGTERM, file=mark, chain=True)  # by the agent, when another rank has failed
    run_rank(decode(Request, json.loads(file.read_text())), info)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
