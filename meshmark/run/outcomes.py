"""How a pass ended: from what came home of its launch, or from what kept it from coming home."""

from __future__ import annotations

import math
import traceback

from meshmark.errors import MeshmarkError
from meshmark.run.launch import LaunchResult
from meshmark.run.record import Outcome, Status


def outcome_of_error(error: BaseException) -> Outcome:
    """A failure outside the ranks; one that nobody foresaw with its stack."""
    if isinstance(error, MeshmarkError):
        return Outcome(status=Status.UNFINISHED, message=str(error))
    stack = "".join(traceback.format_exception(error))
    return Outcome(status=Status.UNFINISHED, message=f"{type(error).__name__}: {error}", traceback=stack)


def outcome_of_launch(launched: LaunchResult) -> Outcome:
    """How the launch ended, after its root cause."""
    if launched.failures:
        first = launched.failures[0]
        return Outcome(
            status=Status(first.kind),
            rank=first.rank,
            message=first.message,
            traceback=first.traceback,
            log_tail=first.log_tail,
            stacks={f.rank: f.stack for f in launched.failures if f.stack},
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
