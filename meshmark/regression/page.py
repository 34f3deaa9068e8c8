"""Format a comparison: lines for a terminal, or a page of markdown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from meshmark.regression.causes import causes
from meshmark.regression.change import Change, ChangeOutcome, Kind
from meshmark.regression.compare import Comparison
from meshmark.regression.times import ALPHA
from meshmark.report.table import inline, one_line, table
from meshmark.text import pluralize

_ORDER = (ChangeOutcome.WORSE, ChangeOutcome.UNDECIDED, ChangeOutcome.BETTER)
_MOST_LINES = 40
"""Number of lines per outcome in a terminal."""


def lines(found: Comparison) -> list[str]:
    """Return lines for changes and undecided metrics, worst first. Unchanged metrics are only counted."""
    told = [f"{pluralize(found.num_cases, 'case')} in both"]
    for side, names in (("A", found.only_before), ("B", found.only_after)):
        if names:
            told.append(f"only in {side}: {', '.join(names[:8])}{f' and {len(names) - 8} more' * (len(names) > 8)}")
    told += [f"conditions differ: {name} {one} in A, {other} in B" for name, (one, other) in found.conditions.items()]
    for outcome in _ORDER:
        rows = causes(change for change in found.of(outcome) if _alone(change))
        told += [one_line(str(cause)) for cause in rows[:_MOST_LINES]]
        if len(rows) > _MOST_LINES:
            told.append(f"... and {len(rows) - _MOST_LINES} more {outcome}; -o FILE.md lists all")
    starts = Counter(change.metric for change in found.of(ChangeOutcome.UNDECIDED) if change.kind is Kind.SLOWER_START)
    told += [
        f"{metric} {ChangeOutcome.UNDECIDED} of {pluralize(cases, 'case')}; -o FILE.md lists all"
        for metric, cases in starts.items()
    ]
    counts = [f"{len(found.of(outcome))} {outcome}" for outcome in (*_ORDER, ChangeOutcome.SAME)]
    return [*told, f"{pluralize(len(found.changes), 'metric')}: {', '.join(counts)}"]


def _alone(change: Change) -> bool:
    """Return whether a change has its own row in a terminal.

    Parts are listed with their total, and undecided starts are too noisy to list one by one.
    """
    return change.gated and not (change.kind is Kind.SLOWER_START and change.outcome is ChangeOutcome.UNDECIDED)


def page(found: Comparison, titles: tuple[str, str], command: str) -> str:
    """Return a markdown page with every metric of every case."""
    a, b = titles
    head = [
        "# Comparison",
        f"Made by {inline(command)}. A: {inline(a)}. B: {inline(b)}.",
        f"{pluralize(found.num_cases, 'case')} in both. Bytes and collectives are exact. Times: Student's t on "
        f"launches, by Holm's method: the chance that equal code has any rate called different here is {ALPHA:.0%}, "
        "and as much that any launch or build has, as far as launches scatter as each row says.",
    ]
    head += [
        f"**Conditions differ**: {inline(name)} {inline(one)} in A, {inline(other)} in B."
        for name, (one, other) in found.conditions.items()
    ]
    head += [
        f"Only in {side}: {inline(', '.join(names))}."
        for side, names in (("A", found.only_before), ("B", found.only_after))
        if names
    ]
    changed = [change for outcome in _ORDER for change in found.of(outcome)]
    parts = [*head, "## Changed or undecided", _table(changed) or "Nothing.", "## The same"]
    same = itertools.groupby(found.of(ChangeOutcome.SAME), key=lambda change: change.case)
    parts += [_same([(case, [change.metric for change in rows]) for case, rows in same]) or "Nothing."]
    return "\n\n".join(parts) + "\n"


def _table(changes: Sequence[Change]) -> str:
    return table(
        [
            {
                "case": change.case,
                "metric": change.metric,
                "B is": str(change.outcome),
                "A": change.before,
                "B": change.after,
                "difference": str(change.effect or ""),
                "evidence": change.evidence,
            }
            for change in changes
        ]
    )


def _same(cases: Sequence[tuple[str, list[str]]]) -> str:
    metrics: dict[str, list[str]] = {}
    for case, names in cases:
        metrics.setdefault(case, []).extend(names)
    return table([{"case": case, "metrics": ", ".join(names)} for case, names in metrics.items()])
