"""One rank's process: what it leaves for the launcher, and how it comes to do so when it was forked."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from meshmark import rank_progress
from meshmark.run.perform import perform
from meshmark.run.rank_info import RankInfo
from meshmark.run.rank_report import RankFailure
from meshmark.run.request import Request
from meshmark.serial import encode

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write every thread's Python stack, even while it hangs inside C."""


def run_forked_rank(request: Request, info: RankInfo) -> NoReturn:
    """A rank that a server has forked: in a session of its own, so that what it starts ends with it."""
    os.setsid()
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
    failed = isinstance(outcome, RankFailure)
    _write(info.file("failure" if failed else "report"), json.dumps(encode(outcome)))
    if isinstance(outcome, RankFailure):
        print(outcome.traceback, file=sys.stderr, end="")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if failed else 0)


def _leave_traces(info: RankInfo) -> None:
    """Own log, progress, stacks and temporary files in the launch's folder; no standard input; leave Ctrl-C to the
    launcher."""
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


def _write(path: Path, text: str) -> None:
    """Atomically: the launcher reads a whole file or none."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
