"""One metric of one case on two sides, and how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ChangeOutcome(StrEnum):
    """Of the second side, B, beside the first, A."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    UNDECIDED = "cannot tell"


class Kind(StrEnum):
    """What `--fail-on` calls a metric of this kind that is worse."""

    WRONG = "wrong"
    """A verdict or a clause that was kept."""
    BIGGER = "bigger"
    """Bytes held or sent."""
    SLOWER = "slower"
    """Fewer tokens, or samples, a second."""
    MISSING = "missing"
    """A case that was run in A and not in B."""
    SLOWER_START = "slower-start"
    """Launches and builds; what a machine does beside them moves these far more than steps."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """By how much B's value differs from A's, as a share of A's; positive is more of it, better or worse."""

    estimate: float
    lowest: float
    """Of the interval that stands with the verdict; equal to the estimate where values are exact."""
    highest: float

    def __str__(self) -> str:
        if self.lowest == self.highest:
            return f"{self.estimate:+.2%}"
        return f"{self.estimate:+.1%}, from {self.lowest:+.1%} to {self.highest:+.1%}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One row of a comparison."""

    case: str
    metric: str
    kind: Kind
    outcome: ChangeOutcome
    before: str = ""
    """A's value in words."""
    after: str = ""
    effect: Effect | None = None
    """None of verdicts, and where nothing bounds it."""
    by: float = 0.0
    """How much worse, as a share of A's; infinite from nothing. Of verdicts 0."""
    evidence: str = ""
    """What shows it: rank, category, collective, samples; or what it would take to tell."""
    moved: tuple[str, ...] = ()
    """Of bytes: the categories, or the collectives, that differ."""
    gated: bool = True
    """Whether `--fail-on` looks at it; the parts of a total are told and not counted twice."""

    @property
    def difference(self) -> str:
        """In words, with its evidence."""
        values = f"{self.before} -> {self.after}" if self.before != self.after else self.before
        told = f" ({self.effect})" if self.effect else ""
        return f"{self.outcome}: {values}{told}{f'; {self.evidence}' if self.evidence else ''}"

    def __str__(self) -> str:
        return f"{self.case}: {self.metric} {self.difference}"
