"""What the instrumented pass of a case computed, found for the untouched pass to be held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshmark.judge.observed_path import ObservedPath
from meshmark.run.launch import LaunchResult
from meshmark.run.record import Record, Status


def find_path(observed: Record | None, timed: LaunchResult, retrace: Callable[[], LaunchResult]) -> ObservedPath | None:
    """What the session's instrumented pass has left, or else what `retrace` makes, which runs its steps once more.
    Where the timed ranks computed other bits it is run in any case, to see whether this engine's bits tell anything.
    None where no such pass came to its end."""
    if observed and observed.outcome.status is not Status.OK:
        return None
    path = (
        ObservedPath(losses=observed.training.losses, digests=observed.conformance.digests)
        if observed
        else _path_of(retrace())
    )
    if path is None or not path.differences(timed.losses, timed.reports[0].timed_digests):
        return path
    again = _path_of(retrace())
    return replace(path, repeats=again == path)


def _path_of(launched: LaunchResult) -> ObservedPath | None:
    if launched.failures:
        return None
    return ObservedPath(losses=launched.losses, digests=launched.reports[0].digests)
