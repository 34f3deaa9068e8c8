"""One rank of one case, in a fresh process."""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from meshmark import rank_progress
from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.run.orphans import die_with_parent
from meshmark.run.passes.dropout import repeat_with_dropout
from meshmark.run.passes.endure import endure
from meshmark.run.passes.fail import fail
from meshmark.run.passes.noise import measure_noise
from meshmark.run.passes.observe import observe
from meshmark.run.passes.overflow import overflow
from meshmark.run.passes.resume import resume, save_halfway
from meshmark.run.passes.timing import time_steps
from meshmark.run.rank_report import RankFailure
from meshmark.run.request import Request, Task
from meshmark.run.store import RunStore, run_secret
from meshmark.serial import encode

_TASKS = {
    Task.OBSERVE: observe,
    Task.TIME: time_steps,
    Task.NOISE: measure_noise,
    Task.SAVE: save_halfway,
    Task.RESUME: resume,
    Task.ENDURE: endure,
    Task.DROPOUT: repeat_with_dropout,
    Task.OVERFLOW: overflow,
    Task.FAIL: fail,
}
STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write every thread's Python stack, even while it hangs inside C."""
_IMPORTER = os.getpid()
"""In a rank, the forkserver, which has imported this module before it forks."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where a rank stands in a launch."""

    rank: int
    local_rank: int
    local_world_size: int
    """Ranks of this launch on this node."""
    world_size: int
    host: str
    port: int
    """Of the run's store; 0 when all ranks are on this node: then the store is a file in `folder`."""
    prefix: str
    """Keys of this launch in the store start with it."""
    folder: Path
    """Of this launch on this node; reports, failures, logs and stacks are left there."""

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.rank}"


def run_rank(request: Request, info: RankInfo) -> None:
    """Entry point of a rank's process: do `request` and leave a report, or leave a failure and exit with 1."""
    started = time.time()
    _isolate(info)
    try:
        timeout = datetime.timedelta(seconds=request.time_limit_seconds + 60)  # the launcher's limit comes first
        store = _store(info, timeout)  # held here: PyTorch keeps no Python store alive
        context = _join(request, info, store, timeout)
        rank_progress.begin(rank_progress.Phase.BUILD)
        report = _TASKS[request.task](request, load_adapter(request.adapter)(), context, started)
        _write(info.file("report"), json.dumps(encode(report)))
        torch.distributed.destroy_process_group()
    except BaseException as error:  # whatever it was, it is this rank's outcome
        failure = RankFailure(
            rank=info.rank,
            kind="oom" if _is_out_of_memory(error) else "raised",
            message=f"{type(error).__name__}: {error}",
            time=time.time(),
            traceback=traceback.format_exc(),
        )
        _write(info.file("failure"), json.dumps(encode(failure)))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # no clean-up: the communication layer's would wait for peers that are gone
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _isolate(info: RankInfo) -> None:
    """Own session, own log, no standard input; die with the forkserver; leave Ctrl-C to the launcher."""
    os.setsid()
    die_with_parent(_IMPORTER if _IMPORTER != os.getpid() else os.getppid())
    _let_go()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for ending in (signal.SIGTERM, signal.SIGHUP):  # the forkserver ignores them
        signal.signal(ending, signal.SIG_DFL)
    log = os.open(info.file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    rank_progress.watch(info.file("progress"))
    faulthandler.register(STACK_SIGNAL, file=open(info.file("stack"), "w"), all_threads=True)  # noqa: SIM115
    os.environ.update(
        RANK=str(info.rank),
        LOCAL_RANK=str(info.local_rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        MASTER_ADDR=info.host,
        MASTER_PORT=str(info.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def _let_go() -> None:
    """Close the pipes by which the forkserver and the resource tracker see that somebody needs them: they are to end
    with the launcher, whatever a rank does then."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    for pipe in (server._forkserver_alive_fd, tracker._fd):
        if pipe is not None:
            os.close(pipe)
    # A framework that needs either starts its own.
    server._forkserver_alive_fd = server._forkserver_address = tracker._fd = None


def _store(info: RankInfo, timeout: datetime.timedelta) -> Store:
    """Where the ranks of this launch meet: a file that this user alone can open, or the store of the nodes."""
    if not info.port:
        return FileStore(str(info.folder / "store"), info.world_size)
    return RunStore(info.host, info.port, run_secret(), timeout)


def _join(request: Request, info: RankInfo, store: Store, timeout: datetime.timedelta) -> RankContext:
    """Bring up the default process group over `store`."""
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    # The flight recorder, on any backend; elsewhere it would only take time, and memory with every collective.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000" if request.task is Task.OBSERVE and request.metered else "0"
    torch.manual_seed(request.case.workload.seed + info.rank)
    if request.device == "cuda":
        torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
    device = (
        torch.device(request.device, torch.cuda.current_device()) if request.device == "cuda" else torch.device("cpu")
    )
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


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _write(path: Path, text: str) -> None:
    """Atomically: the launcher reads a whole file or none."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
