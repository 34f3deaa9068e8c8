"""What a session of pytest asked for, and how each of its tests ended: also of those that left no record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Ending(StrEnum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNFINISHED = "unfinished"
    """It was not run to its end: the session ended before."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One test of a session."""

    test: str
    """pytest's node id."""
    case: str
    """Id of its case, or of the one that its conformance scenarios vary."""
    conforming: bool
    """Of the conformance suite."""
    ending: Ending = Ending.UNFINISHED
    message: str = ""
    """Of one that failed."""
    command: str = ""
    """Runs one that failed again, alone."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of pytest over cases. Its line is written when it begins, and again, complete, when it ends."""

    schema: int
    session: str
    """Its name: the same in both lines, and in no other session's."""
    command: str
    device: str
    corpus: str | None = None
    exit_code: int | None = None
    """pytest's; None until it has ended."""
    attempts: list[Attempt] = field(default_factory=list)


def by_defect(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Those that failed; together what failed of one case with the same first line, as all suites of a pass that
    crashed do."""
    found: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        if attempt.ending is Ending.FAILED:
            found.setdefault((attempt.case, attempt.message.partition("\n")[0]), []).append(attempt)
    return list(found.values())


def standing(sessions: Iterable[Session], *, conforming: bool) -> list[tuple[Attempt, Session]]:
    """How each test of one kind stands, with the session that decided: the last that ran it."""
    found: dict[tuple[str, str, str | None], tuple[Attempt, Session]] = {}
    for session in {each.session: each for each in sessions}.values():
        for attempt in session.attempts:
            key = attempt.test, session.device, session.corpus
            if attempt.conforming is conforming and (attempt.ending is not Ending.UNFINISHED or key not in found):
                found[key] = attempt, session
    return list(found.values())
