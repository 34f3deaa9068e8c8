"""What ranks are asked for in a profiled pass."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.run.request import Request

STEPS = 3
_LONGEST_STEM = 150
"""Of a file's name."""


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
