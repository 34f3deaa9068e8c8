"""A gate's findings as tests of the cases that it looked at, which pages and GitHub show as they show pytest's own."""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.records.session import Attempt, Ending
from meshmark.regression.change import Change
from meshmark.regression.compare import Comparison
from meshmark.report.failure_text import of_changes


def attempts_of(found: Comparison, failing: Sequence[Change], folder: str, command: str) -> list[Attempt]:
    """One a case; it failed if any of `failing` is its. `folder` is what B was held against."""
    by_case: dict[tuple[str, bool], list[Change]] = {_about(change): [] for change in found.changes}
    for change in failing:
        by_case[_about(change)].append(change)
    return [
        Attempt(
            test=f"gate[{case}]",
            case=case.partition(" ")[0],  # what follows tells devices and corpora apart
            conforming=conforming,
            ending=Ending.FAILED if changes else Ending.PASSED,
            message=of_changes(case, folder, [f"{c.metric} {c.difference}" for c in changes]) if changes else "",
            command=command,
        )
        for (case, conforming), changes in by_case.items()
    ]


def _about(change: Change) -> tuple[str, bool]:
    """Its case, and whether it is a clause of conformance, whose cases are an adapter in a layout."""
    return change.case, change.metric.startswith("clause ")
