"""Observe a function that trains, for launchers whose workers run functions and not scripts, such as Ray Train."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

from meshmark.check.rank import meeting_folder, observe


def observed(
    function: Callable[..., Any], *, steps: int = 3, objective: str | None = None, max_disk: float = 8.0
) -> Callable[..., str]:
    """Return a function to be run in the place of `function` by all workers of one launcher on this machine.

    It stops `function` after a few optimizer steps, judges them, prints the verdict on rank 0 and returns its outcome:
    "right", "wrong", "cannot tell" or "could not run". Other ranks return "right" unless they raised. Options are those
    of `meshmark check`. Workers are told their rank by RANK, WORLD_SIZE and MASTER_PORT, as by torchrun, and train
    nothing else afterwards.
    """
    return functools.partial(_run, function, steps=steps, objective=objective, max_disk=max_disk)


def _run(function: Callable[..., Any], *arguments: Any, steps: int, objective: str | None, max_disk: float) -> str:  # noqa: ANN401
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    places = {"folder": None, "keep": None, "output": None}
    asked = argparse.Namespace(steps=steps, objective=objective, max_disk=max_disk, owns_process=False, **places)
    place = meeting_folder(asked, rank)
    try:
        name = getattr(function, "__name__", type(function).__name__)
        return str(observe(asked, name, functools.partial(function, *arguments), place, rank, world))
    finally:
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
