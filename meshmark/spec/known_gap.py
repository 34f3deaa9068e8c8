"""What a framework is known to get wrong."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.spec.case import Case


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
