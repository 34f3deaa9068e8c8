"""What became of a clause: a cell of the conformance table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cell, with what it rests on."""

    result: ClauseResult
    evidence: str
    link: str = ""
