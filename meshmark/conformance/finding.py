"""What became of a clause: a cell of the conformance table."""

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
    """Or without meaning in this layout; the evidence says why."""
    KNOWN_GAP = "known gap"
    """It fails, as its adapter says it will."""
    STALE_GAP = "stale gap"
    """It passes, though its adapter says that it fails: take the gap out."""
    TOLD = "told"
    """What was found is reported and nothing is required: it counts neither as kept nor as broken."""
    UNDECIDED = "undecided"
    """A pass that it rests on was too slow for the time limit: neither kept nor broken."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """What a clause fails by, for others to point to."""

    kind: str
    """The class of a diagnosis, or how a pass ended."""
    detail: str
    plain: bool
    """Whether it shows in the plain scenario, of which all others are variations."""

    @property
    def title(self) -> str:
        """One short line."""
        return textwrap.shorten(self.kind, 80, placeholder=" ...")

    def explains(self, other: Defect) -> bool:
        """Whether `other` is this one again: what is wrong with the plain run stays so in its variations, though with
        other numbers."""
        return self.kind == other.kind and (self.plain or self.detail == other.detail)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cell, with what it rests on."""

    result: ClauseResult
    evidence: str
    link: str = ""
    defect: Defect | None = None
    """What it fails by, where that is known."""


def decide(passed: bool, evidence: str) -> Finding:
    """Kept or broken."""
    return Finding(result=ClauseResult.PASS if passed else ClauseResult.FAIL, evidence=evidence)


def all_of(*findings: Finding) -> Finding:
    """The first that fails, or all."""
    failed = next((f for f in findings if f.result is not ClauseResult.PASS), None)
    return failed or decide(True, "; ".join(f.evidence for f in findings))


def drift_text(drifts: list[Drift]) -> str:
    """Where ranks that should hold the same differ."""
    if not drifts:
        return "equal bit for bit"
    first = drifts[0]
    return f"{len(drifts)} differ, first {first.quantity} at step {first.step} on ranks {first.ranks}"
