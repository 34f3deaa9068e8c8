"""Runs a function on two ranks over gloo, and brings home what the first returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIME_LIMIT_SECONDS = 120


def on_two_ranks(function: Callable[[int], Any]) -> Any:  # noqa: ANN401
    """What `function(0)` returns. Raises the text of the first error as `RuntimeError`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])  # once for all tests; frameworks are the ranks' own
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(function, rank, port, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        answers = [pipe.recv() if pipe.poll(TIME_LIMIT_SECONDS) else "no answer" for pipe, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if errors := [answer for answer in answers if isinstance(answer, str)]:
        raise RuntimeError(errors[0])
    return answers[0][0]


def _rank(function: Callable[[int], Any], rank: int, port: int, answer: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    try:
        answer.send((function(rank),))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
