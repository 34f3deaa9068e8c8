"""Clauses that a framework is known to fail."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.spec.case import Case

SUITES = ("equivalence", "memory", "communication", "throughput")
"""Suites. A user's known gap may name one of them instead of a clause."""


@dataclass(frozen=True, kw_only=True)
class KnownGap:
    """A conformance clause that a framework fails in a documented configuration."""

    clause: str
    reason: str
    symptom: str
    """Text that the failure's evidence contains.

    A failure without this text is a different one, and counts as such.
    """
    link: str = ""
    """URL of an upstream issue."""
    reproducer: str = ""
    """Name of the script in adapters/gaps that reproduces it without Meshmark."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages at which the clause fails."""

    def covers(self, case: Case, clause: str) -> bool:
        return clause == self.clause and case.layout.zero_stage in self.zero_stages
