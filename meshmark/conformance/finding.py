"""Findings of clauses: the cells of the conformance table."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import StrEnum

from meshmark.judge.deviation import Drift


class ClauseResult(StrEnum):
    """A cell of the conformance table."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    """Not supported, or without meaning in this layout. The evidence says why."""
    KNOWN_GAP = "known gap"
    """The clause fails, as its adapter declares."""
    STALE_GAP = "stale gap"
    """The clause passes although its adapter declares that it fails. The gap should be removed."""
    TOLD = "told"
    """The result is only reported, because nothing is required. It counts neither as passed nor as failed."""
    UNDECIDED = "undecided"
    """A pass that the clause needs was too slow for the time limit. It counts neither as passed nor as failed."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """The cause of a failing clause, for other clauses to refer to."""

    kind: str
    """The class of a diagnosis, or how a pass ended."""
    detail: str
    plain: bool
    """True if it shows in the plain scenario, of which all others are variations."""

    @property
    def title(self) -> str:
        """One short line."""
        return textwrap.shorten(self.kind, 80, placeholder=" ...")

    def explains(self, other: Defect) -> bool:
        """Return whether `other` is the same defect.

        A defect of the plain run also shows in its variations, though with other numbers.
        """
        return self.kind == other.kind and (self.plain or self.detail == other.detail)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cell, with its evidence."""

    result: ClauseResult
    evidence: str
    link: str = ""
    defect: Defect | None = None
    """Cause of the failure, if known."""


def decide(passed: bool, evidence: str) -> Finding:
    """Return a finding that passes or fails."""
    return Finding(result=ClauseResult.PASS if passed else ClauseResult.FAIL, evidence=evidence)


def all_of(*findings: Finding) -> Finding:
    """Return the first finding that does not pass, or one that combines all."""
    failed = next((f for f in findings if f.result is not ClauseResult.PASS), None)
    return failed or decide(True, "; ".join(f.evidence for f in findings))


def drift_text(drifts: list[Drift]) -> str:
    """Describe where ranks that should hold the same differ."""
    if not drifts:
        return "equal bit for bit"
    first = drifts[0]
    return f"{len(drifts)} differ, first {first.quantity} at step {first.step} on ranks {first.ranks}"
