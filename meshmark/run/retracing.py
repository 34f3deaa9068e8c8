"""What the verified path of a case comes to, found for the untouched pass to be held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from meshmark.judge.observed_path import ObservedPath
from meshmark.run.launch import LaunchResult
from meshmark.run.record import Record, Status


def find_path(
    observed: Record | None, timed: Sequence[LaunchResult], retrace: Callable[[], LaunchResult]
) -> ObservedPath | None:
    """What `retrace` makes, which runs the instrumented pass's steps once more and goes on to the last that was timed;
    its first steps are those of the session's instrumented pass, where there is one. Where any of the `timed` launches
    computed other bits it is run again, to see whether this engine's bits tell anything. None where no such pass came
    to its end.

    A pass that tried a step again, which loss scaling had left out, has trained on other batches since: it tells
    nothing of bits.
    """
    if observed and observed.outcome.status is not Status.OK:
        return None
    again = _path_of(retrace())
    path = again if observed is None or observed.training.left_out else _judged_first(observed, again)
    if path is None or not any(path.differences(each.losses, each.reports[0].timed_digests) for each in timed):
        return path
    return replace(path, repeats=path == again == _path_of(retrace()))


def _judged_first(observed: Record, again: ObservedPath | None) -> ObservedPath:
    """The steps of the instrumented pass, and on from there what `again` did."""
    losses, digests = observed.training.losses, observed.conformance.digests
    if again is None:
        return ObservedPath(losses=losses, digests=digests)
    return replace(again, losses=losses + again.losses[len(losses) :], digests=digests)


def _path_of(launched: LaunchResult) -> ObservedPath | None:
    if launched.failures:
        return None
    first = launched.reports[0]
    return ObservedPath(
        losses=launched.losses, digests=first.digests, later=first.timed_digests, left_out=first.left_out
    )
