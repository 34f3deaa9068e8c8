"""Convert the findings of a gate to test attempts, which pages and GitHub display like those of pytest."""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.records.record_file import Attempt, Ending
from meshmark.regression.change import Change
from meshmark.regression.compare import Comparison
from meshmark.report.failure_text import of_changes


def attempts_of(found: Comparison, failing: Sequence[Change], folder: str, command: str) -> list[Attempt]:
    """Return one attempt per case, failed if any of `failing` belongs to it. `folder` is what B was compared with."""
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
    """Return the change's case, and whether it is a conformance clause, whose case is an adapter in a layout."""
    return change.case, change.metric.startswith("clause ")
