"""One metric of one case on two sides, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ChangeOutcome(StrEnum):
    """Outcome of the second side, B, compared with the first, A."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    UNDECIDED = "cannot tell"


class Kind(StrEnum):
    """Kinds of metrics, by the name that `--fail-on` uses if they are worse."""

    WRONG = "wrong"
    """Verdicts and clauses that passed before."""
    BIGGER = "bigger"
    """Bytes held or sent."""
    SLOWER = "slower"
    """Fewer tokens, or samples, per second."""
    MISSING = "missing"
    """A case that was run in A and not in B, or clauses that were checked in A alone."""
    SLOWER_START = "slower-start"
    """Launches and builds. Other load on the machine affects these far more than steps."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Difference of B from A, as a share of A. Positive means more, for better or worse."""

    estimate: float
    lowest: float
    """Lower end of the interval behind the verdict. Equal to the estimate if values are exact."""
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
    """None for verdicts, and if the difference has no bounds."""
    by: float = 0.0
    """How much worse B is, as a share of A. Infinite if A is zero, and 0 for verdicts."""
    evidence: str = ""
    """Evidence: rank, category, collective and samples; or what is needed to decide."""
    moved: tuple[str, ...] = ()
    """For bytes: the categories or collectives that differ."""
    gated: bool = True
    """True if `--fail-on` considers it. Parts of a total are reported, but not counted twice."""

    @property
    def difference(self) -> str:
        """The difference in words, with its evidence."""
        values = f"{self.before} -> {self.after}" if self.before != self.after else self.before
        told = f" ({self.effect})" if self.effect else ""
        return f"{self.outcome}: {values}{told}{f'; {self.evidence}' if self.evidence else ''}"

    def __str__(self) -> str:
        return f"{self.case}: {self.metric} {self.difference}"


def incomparable(case: str) -> Change:
    """Return the change of a case whose id stands for two different cases."""
    told = "the same name stands for another workload or layout: nothing of the two compares; rename one"
    return Change(case=case, metric="case", kind=Kind.WRONG, outcome=ChangeOutcome.UNDECIDED, evidence=told)


def untimed(case: str, why: str) -> Change:
    """Return the change of a case whose speed cannot be compared."""
    return Change(case=case, metric="speed", kind=Kind.SLOWER, outcome=ChangeOutcome.UNDECIDED, evidence=why)
