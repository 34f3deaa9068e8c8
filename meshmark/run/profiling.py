"""The profiled pass, from a runner's point of view."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.run.record import Record
from meshmark.run.request import Request, Task
from meshmark.run.runner import Runner
from meshmark.spec.case import Case

STEPS = 3
_LONGEST_STEM = 150
"""Of a file's name."""


def profile(runner: Runner, case: Case) -> Record:
    """The profiled pass over `case`, whose trace is left beside the records."""
    return runner.once(profiling(runner.request(Task.PROFILE, case), runner.results))


def profiling(asked: Request, results: Path) -> Request:
    """A few steps that nothing is compared of; the trace is left beside the records. Raises `ResultsError` where there
    can be none."""
    folder = (results / "traces").absolute()  # ranks may start elsewhere
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{str(folder)!r} cannot be made: {error.strerror}; did its results move?") from error
    digest = hashlib.sha256(repr(asked.case).encode()).hexdigest()[:8]
    trace = folder / f"{asked.case.id[:_LONGEST_STEM]}-{digest}.json.gz"
    return dataclasses.replace(asked, steps=STEPS, assess=False, traces=str(trace))
