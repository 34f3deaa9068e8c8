"""The conformance table of the interactive page, in which every cell opens its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.records.record import Record


@dataclass(frozen=True, kw_only=True)
class ClauseCell:
    """The result of one clause for one adapter."""

    key: str
    """Key of its evidence."""
    text: str
    mark: str
    """CSS class."""
    name: str
    """Text for screen readers."""


@dataclass(frozen=True, kw_only=True)
class ClauseRow:
    """One adapter in one layout."""

    title: str
    cells: Sequence[ClauseCell | None]


@dataclass(frozen=True, kw_only=True)
class Clauses:
    """The table, and its evidence by key."""

    names: Sequence[str]
    rows: Sequence[ClauseRow]
    evidence: dict[str, dict[str, str]]


def clauses(records: Sequence[Record]) -> Clauses | None:
    """Return the table, or None if no record belongs to a scenario."""
    if not any(record.conformance.scenario for record in records):
        return None
    from meshmark.conformance.clauses import CLAUSES  # which imports torch, by way of its scenarios
    from meshmark.conformance.finding import ClauseResult
    from meshmark.report.conformance import columns

    marks = {
        ClauseResult.PASS: ("yes", "yes"),
        ClauseResult.FAIL: ("no", "no"),
        ClauseResult.UNSUPPORTED: ("–", "none"),
        ClauseResult.KNOWN_GAP: ("gap", "gap"),
        ClauseResult.STALE_GAP: ("stale gap", "no"),
        ClauseResult.UNDECIDED: ("too slow", "no"),
        ClauseResult.TOLD: ("reported", "none"),
    }
    found = columns(records)
    names = [name for name in CLAUSES if any(name in column.findings for column in found)]
    evidence: dict[str, dict[str, str]] = {}
    rows = []
    for column in found:
        cells: list[ClauseCell | None] = []
        for name in names:
            finding, key = column.findings.get(name), f"{column.base.id}/{name}"
            if finding is None:
                cells.append(None)
                continue
            text, mark = marks[finding.result]
            title = f"{column.title}, {column.base.layout.id}: {name}"
            cells.append(ClauseCell(key=key, text=text, mark=mark, name=f"{title}: {finding.result}; show evidence"))
            evidence[key] = {
                "title": title,
                "statement": CLAUSES[name].statement,
                "result": str(finding.result),
                "evidence": finding.evidence,
                "link": finding.link,
            }
        rows.append(ClauseRow(title=f"{column.title}, {column.base.layout.id}", cells=cells))
    return Clauses(names=names, rows=rows, evidence=evidence)
