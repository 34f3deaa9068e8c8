"""Run a function, or a reproducer of a known gap, on a few processes of this machine."""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import socket
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

TIME_LIMIT_SECONDS = 400
"""Some scripts compile an operator of DeepSpeed first. One that is killed meanwhile leaves a lock, and others wait."""
_PRELOADED = ["torch", "torch._dynamo", "deepspeed", "accelerate", "transformers", "megatron.core"]
"""Imported once for all tests of a process, in a server that forks their ranks; what is missing is passed over."""


def on_two_ranks(function: Callable[[int], Any]) -> Any:  # noqa: ANN401
    """Return `function(0)` of two ranks that share a process group. Raises the first error's text as `RuntimeError`."""
    return _run(functools.partial(_in_a_group, function), 2)[0]


def run_reproducer(script: Path, num_processes: int, operators: Sequence[str]) -> list[str]:
    """Run a script of `adapters/gaps` as torchrun would. Return what each process exited with; "" for success.

    `operators` names DeepSpeed's C++ operators to load first, which it would otherwise compile. Raises the first
    error's text as `RuntimeError`.
    """
    return _run(functools.partial(_exit_message, script, operators), num_processes)


def start_horovod(rank: int) -> Any:  # noqa: ANN401
    """Start Horovod on one of two ranks of this machine, as its own launcher does. Return its module for PyTorch."""
    import horovod.torch as hvd
    import torch.distributed as dist
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plan, port = get_host_assignments(parse_hosts("localhost:2"), 2), [0]
    if rank == 0:
        server = RendezvousServer()
        port = [server.start()]
        server.init(plan)
    dist.broadcast_object_list(port)
    variables = create_slot_env_vars(plan[rank]) | create_run_env_vars("127.0.0.1", ["lo"], port[0])
    os.environ.update({name: str(value) for name, value in variables.items()})
    hvd.init()
    return hvd


def _run(function: Callable[[int], Any], num_ranks: int) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # which the server keeps
        patch.setenv("DS_ACCELERATOR", "cpu")
        forkserver.ensure_running()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [
        context.Process(target=_rank, args=(function, rank, num_ranks, port, pipe[1]), daemon=True)
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
    return [answer[0] for answer in answers]


def _in_a_group(function: Callable[[int], Any], rank: int) -> Any:  # noqa: ANN401
    import torch

    torch.distributed.init_process_group("gloo")
    return function(rank)


def _exit_message(script: Path, operators: Sequence[str], rank: int) -> str:
    if operators:
        from meshmark.adapters.deepspeed import operators as built

        built.load(*operators)
    if script.name.startswith("horovod_"):
        start_horovod(rank)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return str(end.code or "")
    return ""


def _rank(function: Callable[[int], Any], rank: int, num_ranks: int, port: int, answer: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        answer.send((function(rank),))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
