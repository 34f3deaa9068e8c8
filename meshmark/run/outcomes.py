"""How a pass ended: from what came home of its launch, or from what kept it from coming home."""

from __future__ import annotations

import math
import tempfile
import traceback
from pathlib import Path

from meshmark.errors import MeshmarkError, NodeLostError, NodesDisagreeError, NoSpaceError
from meshmark.launch.folders import is_full, means_no_space
from meshmark.launch.launch import LaunchResult
from meshmark.records.record import Outcome, PeerEnd, Status
from meshmark.text import clip, describe_error

_STATUS: dict[type[BaseException], Status] = {
    NoSpaceError: Status.NO_SPACE,
    NodesDisagreeError: Status.NODES_DISAGREE,
    NodeLostError: Status.NODE_LOST,
}


def outcome_of_error(error: BaseException) -> Outcome:
    """Return the outcome of a failure outside the ranks, with its stack if it is not a `MeshmarkError`.

    Any such failure while the disk of temporary files is full is taken to come of that.
    """
    temporary, full = Path(tempfile.gettempdir()), ""
    status = _STATUS.get(type(error), Status.NO_SPACE if means_no_space(error, [temporary]) else Status.UNFINISHED)
    if status is Status.UNFINISHED and is_full(temporary):
        status, full = Status.NO_SPACE, f", and {str(temporary)!r} is full"
    if isinstance(error, MeshmarkError):
        return Outcome(status=status, message=clip(str(error) + full))
    stack = clip("".join(traceback.format_exception(error)))
    return Outcome(status=status, message=describe_error(error) + full, traceback=stack)


def outcome_of_launch(launched: LaunchResult, world_size: int) -> Outcome:
    """How the launch ended, after its root cause."""
    if launched.lost:
        return Outcome(status=Status.NODE_LOST, message=launched.lost)
    if launched.failures:
        first = launched.failures[0]
        return Outcome(
            status=Status(first.kind),
            rank=first.rank,
            message=first.message,
            traceback=first.traceback,
            log_tail=first.log_tail,
            stacks={f.rank: f.stack for f in launched.failures if f.stack},
            peers=[_peer(launched, rank) for rank in range(world_size) if rank != first.rank],
        )
    bad = [
        (step, report.rank, loss)
        for report in launched.reports
        for step, loss in enumerate(report.losses)
        if not math.isfinite(loss)
    ]
    if bad:
        step, rank, loss = min(bad)
        return Outcome(status=Status.NAN, rank=rank, message=f"loss is {loss} from step {step} on")
    return Outcome(status=Status.OK)


def _peer(launched: LaunchResult, rank: int) -> PeerEnd:
    """Return how `rank` ended after another rank failed."""
    failed = next((f for f in launched.failures if f.rank == rank), None)
    if failed:
        return PeerEnd(rank=rank, kind=failed.kind, seconds=failed.time - launched.failures[0].time)
    done = any(report.rank == rank for report in launched.reports)
    return PeerEnd(rank=rank, kind="done" if done else "ended")
