"""What a framework is known to get wrong."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.spec.case import Case

SUITES = ("equivalence", "memory", "communication", "throughput")
"""What a user's gap may name in the place of a clause: an adapter of this repository has no such gap."""


@dataclass(frozen=True, kw_only=True)
class KnownGap:
    """A clause of the conformance table that a framework, in a documented configuration, fails."""

    clause: str
    reason: str
    symptom: str
    """What the evidence of the failure says: a failure that does not is another one."""
    link: str = ""
    """Upstream, where there is one."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """Where it shows."""

    def covers(self, case: Case, clause: str) -> bool:
        return clause == self.clause and case.layout.zero_stage in self.zero_stages
